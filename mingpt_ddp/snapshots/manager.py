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
from mingpt_ddp.data.dataset import Encoded
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import AwayError, SnapshotError
from mingpt_ddp.snapshots.async_writer import Keeper, Outcome, Save
from mingpt_ddp.snapshots.format import Snapshot, divide
from mingpt_ddp.snapshots.load import load
from mingpt_ddp.snapshots.state_dict import load_model, load_optimizer, model_tensors, optimizer_tensors
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.snapshots.train_state import Position, check_state

log = logging.getLogger(__name__)

QUICK_S = 1.0  # a save that has been under way for less is waited for when the next is due


class Saver:
    """The snapshots of this run, as seen from one rank."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        stores: list[SnapshotStore],
        corpus: Encoded,
        former: list[SnapshotStore] | None = None,
    ) -> None:
        """
        Args:
            stores: where to write; each is used when the one before has failed. They are read all.
            former: where this run has written before its configuration was changed; they are only read.
        """
        self.former = former or []
        self.config, self.runtime, self.corpus = config, runtime, corpus
        self.store, self.stores = stores[0], stores
        self.last_step: int | None = None  # of the newest snapshot that is whole
        self.durable_s: float | None = None  # seconds that the last one took from copy to commit
        self._failures = 0  # in a row
        self._under_way: Save | None = None
        self._keeper = Keeper()
        self._writers: list[int] | None = None

    # Reading.

    def find(self) -> Snapshot | None:
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

        meta = self.runtime.first(look)
        if meta is None:
            return None
        model = self.runtime.broadcast(found.model if found else None)
        optimizer = self.runtime.broadcast(found.optimizer if found else None)
        self.last_step = meta["step"] if meta["own"] else None
        return Snapshot(meta["step"], model, optimizer, meta["state"])

    def _own(self) -> list[Snapshot]:
        """The newest of each place."""
        found, errors = [], []
        for store in [*self.stores, *self.former]:
            try:
                found.append(store.newest())
            except SnapshotError as error:  # all that is there is damaged
                errors.append(error)
        if errors and not any(found):
            raise errors[0]
        for damage in errors:
            log.warning("%s", damage)
        return [snapshot for snapshot in found if snapshot is not None]

    def restore(self, found: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Put a snapshot's content into the live objects."""
        load_model(model, found.model)
        load_optimizer(model, optimizer, found.optimizer)
        if found.state["scaler"] and self.runtime.scaler.is_enabled():
            self.runtime.scaler.load_state_dict(found.state["scaler"])
        return Position(**found.state["position"])

    # Writing. All ranks call these at the same step.

    def begin(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch_size: int
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
        tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        parts = divide(tensors, len(self._seeing_ranks()))
        mine = dict(zip(self._seeing_ranks(), parts, strict=False)).get(self.runtime.rank, {})
        step, best = position.step, position.best_step if self.config.snapshot.keep_best else None

        def tidy(store: SnapshotStore) -> None:
            store.prune(self.config.snapshot.keep_last, best, newest=step)
            if store is self.store:  # what stands elsewhere was for the time without it
                for other in self.stores[1:]:
                    for old in other.steps():
                        if old < step and old != best:
                            other.clear(old)

        encoded = json.dumps(state, indent=1, allow_nan=False).encode()
        self._under_way = Save(self.runtime, self.stores, self._keeper, position.step, mine, encoded, tidy)
        self._under_way.start()

    def _seeing_ranks(self) -> list[int]:
        """The ranks that see the same storage as rank 0: without a shared file system, those of its machine alone."""
        if self._writers is None:
            sees = [self._sees(store) for store in self.stores]
            self._writers = [rank for rank, other in enumerate(self.runtime.gather(sees)) if all(other)]
        return self._writers

    def _sees(self, store: SnapshotStore) -> bool:
        """Whether a file that rank 0 puts there arrives here. A collective."""
        if store.storage.shared or self.runtime.world_size == 1:
            return True
        name = self.runtime.gather(f"probe-{uuid.uuid4().hex}")[0]
        sees = self.runtime.is_main
        if self.runtime.is_main:
            self._try(lambda: store.storage.write(name, b""))
        self.runtime.barrier()
        if not self.runtime.is_main:
            sees = bool(self._try(lambda: store.storage.size(name) is not None))
        self.runtime.barrier()
        if self.runtime.is_main:
            self._try(lambda: store.storage.delete(name))
        return sees

    @staticmethod
    def _try(work: Callable[[], Any]) -> Any:
        """A storage that cannot be used is told of when a snapshot goes there."""
        try:
            return work()
        except OSError:
            return None

    def wait_for_copy(self) -> None:
        """Return when the weights may change."""
        if self._under_way is not None:
            self._under_way.copied.wait()

    @property
    def busy(self) -> bool:
        """Whether this rank still works on a snapshot."""
        return self._under_way is not None and self._under_way.outcome is None

    def is_free(self) -> bool:
        """Whether the next may begin, on all ranks. A collective, which waits for one that is nearly done."""
        if self._under_way is None:
            return True
        if (self.durable_s or 0.0) < QUICK_S:  # else it would only hold up training
            self._under_way.join(max(0.0, self._under_way.began + QUICK_S - time.monotonic()))
        if self.runtime.sum(torch.tensor([float(self.busy)])).item():
            return False
        self.collect()
        return True

    def finish(self, until: float | None = None) -> bool:
        """Wait for the one that is under way, at most until a time of time.monotonic(); whether it is done.

        A collective. Raises as `collect` does.
        """
        if self._under_way is None:
            return True
        while self.busy and (until is None or time.monotonic() < until):
            self._under_way.join(0.05)
            self.runtime.at("waiting for a snapshot")
        if self.runtime.sum(torch.tensor([float(self.busy)])).item():
            return False
        self.collect()
        return True

    def collect(self) -> None:
        """Take note of what became of the one that was under way; no rank may be busy any more.

        Raises:
            AwayError: it failed, and so often that the run should not go on.
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

    def _count_failure(self, outcome: Outcome) -> None:
        self._failures += 1
        allowed = self.config.snapshot.max_failures
        told = f"cannot write the snapshot of step {outcome.step}: {outcome.problem}"
        if self._failures > allowed:
            times = f", {self._failures} times in a row" if self._failures > 1 else ""
            raise AwayError(
                f"{told}{times}; the older ones are whole: mend this and run again, or set snapshot.fallback_path"
            )
        log.warning("%s; training goes on (failure %d of %d allowed)", told, self._failures, allowed)

    def hurry(self, seconds: float) -> None:
        """Leave each place but the last so much time together, now and later."""
        for store in self.stores[:-1]:
            store.storage.hurry(seconds)

    def insist(self, step: int, begin: Callable[[], None]) -> None:
        """Wait for the snapshot of `step`, and begin again as often as failures are allowed.

        Raises:
            AwayError: there is no such snapshot now.
        """
        self.finish()
        while self.last_step != step:
            begin()
            self.finish()
