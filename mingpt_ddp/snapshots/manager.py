"""Save and load the snapshots of a run.

Rank zero reads, and the ranks that share its storage write. If the ranks hold shards of the state,
each of them writes and reads its own shard.
"""

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import (
    StorageUnavailableError,
    StorageUnusableError,
    UserError,
)
from mingpt_ddp.snapshots.format import (
    HOOKS,
    KINDS,
    STATE,
    TENSOR_KINDS,
    WEIGHT_KINDS,
    Snapshot,
    encode_json,
)
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.snapshots.read.shard_reader import read_shards
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.write.async_writer import AsyncSave, Capture, FileContents
from mingpt_ddp.snapshots.write.ledger import Ledger, digest_settings
from mingpt_ddp.snapshots.write.retention import apply_retention
from mingpt_ddp.snapshots.write.shard_plan import ShardPlan, TensorsByKind
from mingpt_ddp.snapshots.write.store import SnapshotStore

log = logging.getLogger(__name__)
Check = Callable[[int, Any], None]  # takes step and state of a snapshot; raises if unusable

# Errors of a storage that stays unusable until someone repairs it.
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
QUICK_S = 1.0  # a faster save is awaited when the next one is due


@dataclass(frozen=True)
class RunState:
    """The state of a run after a step."""

    step: int
    state: dict[str, Any]  # the content of state.json
    tensors: TensorsByKind  # they must not change until `wait_for_staging` returns
    best_step: int | None  # step of the snapshot that snapshot.keep_best keeps


class SnapshotManager:
    """The snapshots of this run. All ranks call the same methods at the same step."""

    def __init__(
        self, config: Config, runtime: Runtime, store: SnapshotStore, directory: Path
    ) -> None:
        """
        Args:
            store: The snapshots of the run.
            directory: The run directory. The ledger is in it.
        """
        self.config = config
        self.runtime = runtime
        self.store = store
        self._kinds = (*KINDS, HOOKS) if config.trainer.ema is None else TENSOR_KINDS
        self.last_step: int | None = None  # step of the newest committed snapshot
        self.durable_s: float | None = None  # seconds from the start of the last save to its commit
        self._failures = 0  # number of consecutive failed saves
        self._save: AsyncSave | None = None  # in progress
        self._buffers: dict[str, SafetensorsBuffer] = {}
        self._shard_plan = ShardPlan(runtime, store)
        self._ledger = Ledger(directory)

    # Loading.

    def load_latest(self, check: Check) -> Snapshot | None:
        """Return the newest snapshot of the run, else that of run.resume, on every rank.

        A collective. If each rank reads its own shard, `read_shards` adds the tensors.

        Args:
            check: Called on rank zero with the step and the state of the snapshot. It raises an
                exception if the run cannot use the snapshot.

        Raises:
            SnapshotError: There are snapshots, but none that this run can resume from.
        """
        group = self.runtime.group
        whole = self.runtime.strategy.shards == 1
        if not whole:
            self._shard_plan.check_reach()

        def find() -> tuple[Snapshot | None, bool]:
            source = self.config.run.source
            newest = self.store.read_latest(self._kinds, whole)
            is_own = newest is not None
            if source and not is_own:
                newest = load(source, self._kinds, whole=whole)
            elif source:
                log.info("run.resume=%s is ignored: the run has snapshots of its own", source)
            if newest is not None:
                check(newest.step, newest.state)
            return newest, is_own

        newest, is_own = group.keep_on_rank_zero(find) or (None, False)
        meta: dict[str, Any] | None = None
        if newest is not None:
            values = {"step": newest.step, "state": newest.state, "index": newest.index}
            meta = {"values": values, "is_own": is_own}
        meta = group.broadcast_json(meta)
        if meta is None:
            return None
        tensors: dict[str, Any] = {}
        for kind in TENSOR_KINDS:
            tensors[kind] = group.broadcast_tensors(getattr(newest, kind) if newest else None)
        snapshot = Snapshot(**meta["values"], **tensors)
        self.last_step = snapshot.step if meta["is_own"] else None
        return snapshot

    def read_shards(self, snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> Snapshot:
        """Return the snapshot with this rank's tensors of model and optimizer. A collective."""
        if snapshot.index is not None:
            return read_shards(self.runtime, snapshot, model, optimizer)
        parts: dict[str, Any] = {}
        for kind in WEIGHT_KINDS:
            parts[kind] = self.runtime.strategy.split_tensors(getattr(snapshot, kind), model)
        return replace(snapshot, **parts)

    # Saving.

    def save(self, run: RunState) -> None:
        """Start an asynchronous save. No other save may be in progress."""
        assert self._save is None
        env = self.runtime.group.env
        step = run.step
        best = run.best_step if self.config.snapshot.keep_best else None
        retain = partial(apply_retention, self.config.snapshot, self.store, step, best)
        if step == self.last_step:
            # it is committed, but other snapshots may have to be deleted
            self._apply_retention(retain)
            return
        tensors = self._shard_plan.own_files(run.tensors)
        files: FileContents = {**tensors}
        encoded = env.call_on_rank_zero(lambda: encode_json(run.state))
        if encoded is not None:
            files[STATE] = encoded
        settings = env.call_on_rank_zero(lambda: digest_settings(run.state)) or ""
        capture = Capture(step, files, settings)
        self._save = AsyncSave(
            self.runtime, self.store, self._buffers, capture, retain, self._ledger
        )
        self._save.start()

    def _apply_retention(self, retain: Callable[[], None]) -> None:
        """Delete on a thread: a slow object store is not a hang."""
        call = self.runtime.group.env.call_on_rank_zero
        thread = Thread(target=call, args=(retain,), name="retention", daemon=True)
        thread.start()
        self._join(thread)

    def _join(self, thread: Thread, until: float | None = None) -> None:
        """Wait for a thread, at most until `until`, and send heartbeats."""
        while thread.is_alive() and (until is None or time.monotonic() < until):
            thread.join(0.05)
            self.runtime.group.set_activity("waiting for a snapshot")

    @property
    def is_staging(self) -> bool:
        """True while the tensors of the save in progress are being copied."""
        return self._save is not None and not self._save.staged.is_set()

    def wait_for_staging(self) -> None:
        """Wait until the tensors of the save in progress may change."""
        if self._save is None:
            return
        with self.runtime.group.waiting():  # reading waits for a GPU
            self._save.staged.wait()

    @property
    def save_in_progress(self) -> bool:
        """True while this rank's thread is running."""
        return self._save is not None and self._save.is_alive()

    @property
    def quick_deadline(self) -> float:
        """The time.monotonic() until which to wait for the save in progress if another is due."""
        if self._save is None or (self.durable_s or 0.0) >= QUICK_S:
            return 0.0  # waiting for a slow save would stall training
        return self._save.started_at + QUICK_S

    def wait(self, until: float | None = None) -> bool:
        """Wait for the save in progress, at most until `until` by time.monotonic().

        A collective: the save is done once it is done on all ranks.

        Returns:
            True if the save is done.

        Raises:
            StorageUnavailableError: More than snapshot.max_failures saves have failed. A restart
                may succeed.
            StorageUnusableError: The same, and a restart would fail for the same reason.
            RunError: Another process has taken over the lease, or the run directory was deleted.
        """
        save = self._save
        if save is None:
            return True
        self._join(save, until)
        ranks_at_work = self.runtime.group.all_reduce(torch.tensor([float(save.is_alive())]))
        if ranks_at_work.item():
            return False
        self._save = None
        if save.error is not None:
            raise save.error
        if save.failure is not None:
            self._failures += 1
            allowed = self.config.snapshot.max_failures
            if self._failures > allowed:
                raise self._final_error(save.step, save.failure) from save.failure
            log.warning(
                "cannot write the snapshot of step %d: %s: %s; training continues (failure %d of "
                "%d allowed)",
                save.step,
                self.store.url,
                save.failure,
                self._failures,
                allowed,
            )
            return True
        self.last_step = save.step
        self.durable_s = save.duration_s
        self._failures = 0
        in_file = {"file_only": True}
        log.info("snapshot of step %d committed to %s", save.step, self.store.url, extra=in_file)
        return True

    def _final_error(self, step: int, failure: OSError) -> UserError:
        """Return the error that ends the run after too many failures."""
        times = f", {self._failures} times in a row" if self._failures > 1 else ""
        is_lasting = failure.errno in LASTING
        kind = StorageUnusableError if is_lasting else StorageUnavailableError
        return kind(
            f"cannot write the snapshot of step {step}: {self.store.url}: {failure}{times}; older "
            "snapshots are intact: fix this and run again"
        )
