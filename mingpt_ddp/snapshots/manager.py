"""Save and load the snapshots of a run: rank zero reads, every rank that shares rank zero's storage
writes a shard.

If the strategy divides the state, every rank writes and reads its own part.
"""

import contextlib
import errno
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import (
    ConfigError,
    SnapshotError,
    StorageUnavailableError,
    StorageUnusableError,
)
from mingpt_ddp.snapshots.async_writer import AsyncSave, Parts
from mingpt_ddp.snapshots.format import (
    KINDS,
    STATE,
    TENSOR_KINDS,
    Snapshot,
    shard_name,
    shard_tensors,
)
from mingpt_ddp.snapshots.load import load, stores_of_run
from mingpt_ddp.snapshots.pieces import own_parts
from mingpt_ddp.snapshots.shard_reader import ShardReader
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import PROBE

log = logging.getLogger(__name__)
Check = Callable[[int, Any], None]  # takes step and state of a snapshot; raises if unusable

# what no restart mends
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
QUICK_S = 1.0  # a faster save is awaited when the next one is due


class SnapshotManager:
    """The snapshots of this run. All ranks call the same methods at the same step."""

    def __init__(
        self, config: Config, runtime: Runtime, stores: list[SnapshotStore], directory: Path
    ) -> None:
        """
        Args:
            stores: where to write; each is a fallback for the one before. All of them are read.
            directory: of the run; stores of earlier configurations that it records are only read.
        """
        self.config = config
        self.runtime = runtime
        self.stores = stores
        self.directory = directory
        self._kinds = KINDS if config.trainer.ema is None else TENSOR_KINDS
        self.last_step: int | None = None  # of the newest snapshot that is committed
        self.durable_s: float | None = None  # from the start of the last save to its commit
        self._failures = 0  # in a row
        self._save: AsyncSave | None = None  # in progress
        self._buffers: dict[str, SafetensorsBuffer] = {}
        self._writers: list[int] = []

    # Loading.

    def load_latest(self, check: Check) -> Snapshot | None:
        """Return the newest snapshot of the run, else that of run.resume, on every rank.

        A collective.

        If the strategy divides the state, `read_shards` adds the tensors.

        Args:
            check: called on rank zero with the step and the state of the snapshot; raises if it
                cannot be used.

        Raises:
            SnapshotError: there are snapshots, but none that this run can resume from.
        """
        found: Snapshot | None = None
        whole = not self.runtime.strategy.is_sharded
        if not whole:
            self._find_writers()

        def find() -> dict[str, Any] | None:
            nonlocal found
            own = self._newest_of_each_store(whole)
            found = max(own, key=lambda snapshot: snapshot.step, default=None)
            if source := self.config.run.source:
                if found is not None:
                    log.info("run.resume=%s is ignored: the run has snapshots of its own", source)
                found = found or load(source, self._kinds, whole=whole)
            if found is None:
                return None
            check(found.step, found.state)
            return {"step": found.step, "state": found.state, "own": bool(own)}

        meta = self.runtime.group.run_on_rank_zero(find)
        if meta is None:
            return None
        self.last_step = meta["step"] if meta["own"] else None
        if not whole:
            return Snapshot(
                meta["step"],
                {},
                {},
                meta["state"],
                index=self._broadcast_json(found and found.index),
            )
        model = self.runtime.group.broadcast_tensors(found.model if found else None)
        optimizer = self.runtime.group.broadcast_tensors(found.optimizer if found else None)
        ema = self.runtime.group.broadcast_tensors(found.ema if found else None)
        return Snapshot(meta["step"], model, optimizer, meta["state"], ema)

    def _broadcast_json(self, value: Any) -> Any:
        """Return rank zero's value on every rank; an all_gather would hold it once per rank."""
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sent = self.runtime.group.env.call_on_rank_zero(lambda: {"json": content})
        return json.loads(self.runtime.group.broadcast_tensors(sent)["json"].numpy().tobytes())

    def read_shards(self, snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> Snapshot:
        """Return the snapshot with the tensors that this rank holds of the model and the optimizer.

        A collective.
        """
        if snapshot.index is not None:
            return ShardReader(self.runtime).read(snapshot, model, optimizer)
        split = self.runtime.strategy.split_tensors
        tensors: dict[str, Any] = {
            kind: split(getattr(snapshot, kind), model) for kind in TENSOR_KINDS
        }
        return replace(snapshot, **tensors)

    def _newest_of_each_store(self, whole: bool) -> list[Snapshot]:
        found = []
        errors = []
        for store in stores_of_run(self.stores, self.directory):
            try:
                found.append(store.read_latest(self._kinds, whole))
            except SnapshotError as error:  # all its snapshots are damaged
                errors.append(error)
        if errors and not any(found):
            raise errors[0]
        for damage in errors:
            log.warning("%s", damage)
        return [snapshot for snapshot in found if snapshot is not None]

    # Saving.

    def save(
        self,
        step: int,
        state: dict[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        best_step: int | None,
    ) -> None:
        """Start an asynchronous save; no other save may be in progress.

        Args:
            state: the content of state.json.
            tensors: by kind (model, optimizer, ema) and name; they must not change until
                `wait_for_staging` returns.
            best_step: of the snapshot that snapshot.keep_best keeps.
        """
        assert self._save is None
        group = self.runtime.group
        best = best_step if self.config.snapshot.keep_best else None
        if step == self.last_step:  # perhaps without its retention, or with another one as the best
            for store in self.stores:
                group.env.call_on_rank_zero(partial(self._apply_retention, step, best, store))
            return
        parts: Parts = self._own_files(tensors)
        group.env.call_on_rank_zero(
            lambda: parts.update({STATE: json.dumps(state, indent=1, allow_nan=False).encode()})
        )
        self._save = AsyncSave(
            self.runtime,
            self.stores,
            self._buffers,
            step,
            parts,
            partial(self._apply_retention, step, best),
        )
        self._save.start()

    def _apply_retention(self, step: int, best: int | None, store: SnapshotStore) -> None:
        """Delete the snapshots that a store need not keep once it has that of `step`."""
        config = self.config.snapshot
        every = self.config.snapshot.keep_every
        try:
            if not store.is_committed(step):
                return
            store.prune(config.keep_last, best, step, every)
            # The fallbacks were needed only while the first store failed.
            for fallback in self.stores[1:] if store is self.stores[0] else []:
                for old in fallback.steps():
                    if old < step and old != best and not (every and old % every == 0):
                        fallback.clear(old)
        except Exception as error:  # the new snapshot is committed nevertheless
            log.warning("cannot delete older snapshots at %s: %s", store.url, error)

    def _own_files(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Parts:
        """Return the files that this rank writes, without the state."""
        rank = self.runtime.group.rank
        strategy = self.runtime.strategy
        if not strategy.is_sharded:
            self._writers = self._writers or self._ranks_with_same_storage() or [0]
            whole = {kind: strategy.join_tensors(named) for kind, named in tensors.items()}
            shards = dict(
                zip(self._writers, shard_tensors(whole, len(self._writers)), strict=False)
            )
            return dict(shards.get(rank, {}))
        if rank >= strategy.shards:  # another replica
            return {}
        return {
            shard_name(k, rank, strategy.shards): own_parts(strategy, named)
            for k, named in tensors.items()
        }

    def _find_writers(self) -> None:
        """Check that all ranks reach the storage.

        Raises:
            ConfigError: some do not.
        """
        group = self.runtime.group
        self._writers = self._writers or self._ranks_with_same_storage()
        if 0 < len(self._writers) < group.world_size:
            others = next(rank for rank in range(group.world_size) if rank not in self._writers)
            raise ConfigError(
                f"ddp.strategy={self.runtime.strategy.name} needs snapshots that every rank "
                f"reaches, but rank {others} "
                "does not see the files of rank 0; set snapshot.path to a shared directory "
                "or an object store"
            )

    def _ranks_with_same_storage(self) -> list[int]:
        """Return the ranks that see rank zero's files: those of its node, or all ranks on a shared
        filesystem.

        Returns [] if rank zero cannot write.
        """
        group = self.runtime.group
        storages = [
            store.storage
            for store in self.stores
            if group.world_size > 1 and not store.storage.shared
        ]

        def write_probes() -> str:
            name = f"{PROBE}{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):  # the save will hit the same error and handle it
                for storage in storages:
                    storage.write(name, b"")
            return name

        name = group.run_on_rank_zero(write_probes)
        sees_all = False
        with contextlib.suppress(OSError):
            sees_all = all(storage.size(name) is not None for storage in storages)
        ranks = [rank for rank, sees in enumerate(group.all_gather(sees_all)) if sees]
        with contextlib.suppress(OSError):
            for storage in storages:
                group.env.call_on_rank_zero(partial(storage.delete, name))
        return ranks

    def wait_for_staging(self) -> None:
        """Return when the tensors of the save in progress may change."""
        if self._save is not None:
            self._save.staged.wait()

    @property
    def save_in_progress(self) -> bool:
        """Return whether this rank's thread is running."""
        return self._save is not None and self._save.is_alive()

    @property
    def quick_deadline(self) -> float:
        """The time.monotonic() until which to wait for the save in progress before starting
        another.
        """
        # Waiting for a slow save would stall training.
        return (
            self._save.started_at + QUICK_S
            if self._save and (self.durable_s or 0.0) < QUICK_S
            else 0.0
        )

    def wait(self, until: float | None = None) -> bool:
        """Wait for the save in progress, at most until `until` by time.monotonic().

        Return whether it is done.

        A collective: the save is done once it is done on all ranks.

        Raises:
            StorageUnavailableError: it failed, and snapshot.max_failures are exceeded; a restart
                may succeed.
            StorageUnusableError: so it did, and a restart would fail too.
            RunError: another process has taken over the lease, or the run directory was deleted.
        """
        save = self._save
        if save is None:
            return True
        while save.is_alive() and (until is None or time.monotonic() < until):
            save.join(0.05)
            self.runtime.group.set_activity("waiting for a snapshot")
        if self.runtime.group.all_reduce(torch.tensor([float(save.is_alive())])).item():
            return False
        self._save = None
        if save.error is not None:
            raise save.error
        reason = f"{save.failure[0]}: {save.failure[1]}" if save.failure else ""
        if save.url is None:
            self._failures += 1
            message = f"cannot write the snapshot of step {save.step}: {reason}"
            older = (
                "older snapshots are intact: fix this and run again, or set snapshot.fallback_path"
            )
            if self._failures > (allowed := self.config.snapshot.max_failures):
                times = f", {self._failures} times in a row" if self._failures > 1 else ""
                cause = save.failure[1] if save.failure else None
                is_lasting = cause is not None and cause.errno in LASTING
                kind = StorageUnusableError if is_lasting else StorageUnavailableError
                raise kind(f"{message}{times}; {older}") from cause
            log.warning(
                "%s; training continues (failure %d of %d allowed)",
                message,
                self._failures,
                allowed,
            )
            return True
        self.last_step = save.step
        self.durable_s = save.duration_s
        if save.failure:
            log.warning(
                "snapshot of step %d committed to %s, because of %s", save.step, save.url, reason
            )
        else:
            self._failures = 0
            log.info(
                "snapshot of step %d committed to %s",
                save.step,
                save.url,
                extra={"file_only": True},
            )
        return True

    def set_deadline(self, seconds: float) -> None:
        """Set a deadline, in seconds from now, for the operations on each store but the last."""
        for store in self.stores[:-1]:
            store.storage.set_deadline(seconds)
