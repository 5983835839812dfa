"""Capture the run into snapshots and restore it: rank 0 reads, each rank that sees the same storage writes a share."""

from __future__ import annotations

import json
import logging
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.async_writer import AsyncSave, SaveResult, StagingBuffers
from mingpt_ddp.snapshots.format import Snapshot, shard_tensors
from mingpt_ddp.snapshots.load import load
from mingpt_ddp.snapshots.state_dict import load_model_state, load_optimizer_state, model_state, optimizer_state
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.snapshots.train_state import TrainState, check_state

log = logging.getLogger(__name__)

QUICK_S = 1.0  # a save that has been under way for less is waited for when the next is due


class SnapshotManager:
    """The snapshots of this run, as seen from one rank."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        stores: list[SnapshotStore],
        corpus: EncodedText,
        previous_stores: list[SnapshotStore] | None = None,
    ) -> None:
        """
        Args:
            stores: where to write; each is used when the one before has failed. They are read all.
            previous_stores: where this run has written before its configuration was changed; they are only read.
        """
        self.previous_stores = previous_stores or []
        self.config, self.runtime, self.corpus = config, runtime, corpus
        self.store, self.stores = stores[0], stores
        self.last_step: int | None = None  # of the newest snapshot that is whole
        self.durable_s: float | None = None  # seconds that the last one took from copy to commit
        self._failures = 0  # in a row
        self._under_way: AsyncSave | None = None
        self._keeper = StagingBuffers()
        self._writers: list[int] | None = None

    # Reading.

    def load_latest(self) -> Snapshot | None:
        """The snapshot to resume from, on every rank; the run's own, else that of run.resume. A collective.

        Raises:
            SnapshotError: there are snapshots, but none that this run can continue.
        """
        found: Snapshot | None = None

        def look() -> dict[str, Any] | None:
            nonlocal found
            own = self._own()
            found = max(own, key=lambda snapshot: snapshot.step, default=None)
            if found is None and self.config.run.resume not in ("auto", "never"):
                found = load(self.config.run.resume)
            if found is None:
                return None
            check_state(found.step, found.state, self.config, self.corpus)
            return {"step": found.step, "state": found.state, "own": bool(own)}

        meta = self.runtime.group.run_on_rank_zero(look)
        if meta is None:
            return None
        model = self.runtime.group.broadcast_tensors(found.model if found else None)
        optimizer = self.runtime.group.broadcast_tensors(found.optimizer if found else None)
        self.last_step = meta["step"] if meta["own"] else None
        return Snapshot(meta["step"], model, optimizer, meta["state"])

    def _own(self) -> list[Snapshot]:
        """The newest of each place."""
        found, errors = [], []
        for store in [*self.stores, *self.previous_stores]:
            try:
                found.append(store.read_latest())
            except SnapshotError as error:  # all that is there is damaged
                errors.append(error)
        if errors and not any(found):
            raise errors[0]
        for damage in errors:
            log.warning("%s", damage)
        return [snapshot for snapshot in found if snapshot is not None]

    def restore(self, found: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
        """Put a snapshot's content into the live objects."""
        load_model_state(model, found.model)
        load_optimizer_state(model, optimizer, found.optimizer)
        if found.state["scaler"] and self.runtime.scaler.is_enabled():
            self.runtime.scaler.load_state_dict(found.state["scaler"])
        return TrainState(**found.state["position"])

    # Writing. All ranks call these at the same step.

    def save(
        self, position: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch_size: int
    ) -> None:
        """Set out to save the state after `position.step` steps; nothing may be under way."""
        assert self._under_way is None
        if position.step == self.last_step:
            return
        position.saved_at = time.time()
        state = {
            "position": asdict(position),
            "scaler": self.runtime.scaler.state_dict(),
            "micro_batch_size": micro_batch_size,
            "vocabulary": self.corpus.vocabulary,
            "corpus": {"sha256": self.corpus.sha256, "length": self.corpus.length},
            "config": self.config.to_dict(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        tensors = {"model": model_state(model), "optimizer": optimizer_state(model, optimizer)}
        parts = shard_tensors(tensors, len(self._writer_ranks()))
        mine = dict(zip(self._writer_ranks(), parts, strict=False)).get(self.runtime.group.rank, {})
        step, best = position.step, position.best_step if self.config.snapshot.keep_best else None

        def apply_retention(store: SnapshotStore) -> None:
            store.prune(self.config.snapshot.keep_last, best, newest=step)
            if store is self.store:  # what stands elsewhere was for the time without it
                for other in self.stores[1:]:
                    for old in other.steps():
                        if old < step and old != best:
                            other.clear(old)

        encoded = json.dumps(state, indent=1, allow_nan=False).encode()
        self._under_way = AsyncSave(
            self.runtime, self.stores, self._keeper, position.step, mine, encoded, apply_retention
        )
        self._under_way.start()

    def _writer_ranks(self) -> list[int]:
        """The ranks that see the same storage as rank 0: without a shared file system, those of its machine alone."""
        if self._writers is None:
            sees = [self._shares_storage(store) for store in self.stores]
            self._writers = [rank for rank, other in enumerate(self.runtime.group.all_gather(sees)) if all(other)]
        return self._writers

    def _shares_storage(self, store: SnapshotStore) -> bool:
        """Whether a file that rank 0 puts there arrives here. A collective."""
        if store.storage.shared or self.runtime.group.world_size == 1:
            return True
        name = self.runtime.group.all_gather(f"probe-{uuid.uuid4().hex}")[0]
        sees = self.runtime.group.is_rank_zero
        if self.runtime.group.is_rank_zero:
            self._try(lambda: store.storage.write(name, b""))
        self.runtime.group.barrier()
        if not self.runtime.group.is_rank_zero:
            sees = bool(self._try(lambda: store.storage.size(name) is not None))
        self.runtime.group.barrier()
        if self.runtime.group.is_rank_zero:
            self._try(lambda: store.storage.delete(name))
        return sees

    @staticmethod
    def _try(work: Callable[[], Any]) -> Any:
        """A storage that cannot be used is told of when a snapshot goes there."""
        try:
            return work()
        except OSError:
            return None

    def wait_for_staging(self) -> None:
        """Return when the weights may change."""
        if self._under_way is not None:
            self._under_way.staging_done.wait()

    @property
    def save_in_progress(self) -> bool:
        """Whether this rank still works on a snapshot."""
        return self._under_way is not None and self._under_way.outcome is None

    def can_start(self) -> bool:
        """Whether the next may begin, on all ranks. A collective, which waits for one that is nearly done."""
        if self._under_way is None:
            return True
        if (self.durable_s or 0.0) < QUICK_S:  # else it would only hold up training
            self._under_way.join(max(0.0, self._under_way.began + QUICK_S - time.monotonic()))
        if self.runtime.group.all_reduce(torch.tensor([float(self.save_in_progress)])).item():
            return False
        self.finalize()
        return True

    def wait(self, until: float | None = None) -> bool:
        """Wait for the one that is under way, at most until a time of time.monotonic(); whether it is done.

        A collective. Raises as `collect` does.
        """
        if self._under_way is None:
            return True
        while self.save_in_progress and (until is None or time.monotonic() < until):
            self._under_way.join(0.05)
            self.runtime.group.set_activity("waiting for a snapshot")
        if self.runtime.group.all_reduce(torch.tensor([float(self.save_in_progress)])).item():
            return False
        self.finalize()
        return True

    def finalize(self) -> None:
        """Take note of what became of the one that was under way; no rank may be busy any more.

        Raises:
            StorageUnavailableError: it failed, and so often that the run should not go on.
            RunError: this run has lost its place.
        """
        if self._under_way is None:
            return
        self._under_way.join()
        outcome, self._under_way = self._under_way.outcome, None
        assert outcome is not None
        if outcome.fatal is not None:
            raise outcome.fatal
        if outcome.place is None:
            self._count_failure(outcome)
            return
        self._failures = 0 if outcome.problem is None else self._failures
        self.last_step, self.durable_s = outcome.step, outcome.seconds
        if outcome.problem:
            log.warning(
                "snapshot of step %d committed to %s, because of %s", outcome.step, outcome.place, outcome.problem
            )
        else:
            log.info("snapshot of step %d committed to %s", outcome.step, outcome.place, extra={"file_only": True})

    def _count_failure(self, outcome: SaveResult) -> None:
        self._failures += 1
        allowed = self.config.snapshot.max_failures
        told = f"cannot write the snapshot of step {outcome.step}: {outcome.problem}"
        if self._failures > allowed:
            times = f", {self._failures} times in a row" if self._failures > 1 else ""
            raise StorageUnavailableError(
                f"{told}{times}; the older ones are whole: mend this and run again, or set snapshot.fallback_path"
            )
        log.warning("%s; training goes on (failure %d of %d allowed)", told, self._failures, allowed)

    def set_deadline(self, seconds: float) -> None:
        """Leave each place but the last so much time together, now and later."""
        for store in self.stores[:-1]:
            store.storage.set_deadline(seconds)

    def save_with_retries(self, step: int, begin: Callable[[], None]) -> None:
        """Wait for the snapshot of `step`, and begin again as often as failures are allowed.

        Raises:
            StorageUnavailableError: there is no such snapshot now.
        """
        self.wait()
        while self.last_step != step:
            begin()
            self.wait()
