"""Save and load the snapshots of a run.

If all ranks hold the same state, rank zero reads it, and the ranks that share a storage with rank
zero divide the writing among them. If each rank holds a shard of the state, it reads and writes its
own shard.
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
    REQUIRED_KINDS,
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
# Takes the step and the state of a snapshot. Raises an exception if the run cannot use them.
Check = Callable[[int, Any], None]

# With these errors, the storage stays unusable until someone repairs it.
LASTING_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
# The next save may be due while a save is still in progress. Training then waits for the save in
# progress, if the last save took less than this. Waiting for a slower save would stall training.
QUICK_SAVE_S = 1.0


@dataclass(frozen=True)
class RunState:
    """The state of a run after a step."""

    step: int
    state: dict[str, Any]  # the content of state.json
    tensors: TensorsByKind  # must not change until `wait_for_staging` returns
    best_step: int | None  # the step whose snapshot snapshot.keep_best keeps


class SnapshotManager:
    """The snapshots of this run. All ranks call the same methods at the same step."""

    def __init__(
        self, config: Config, runtime: Runtime, store: SnapshotStore, directory: Path
    ) -> None:
        """
        Args:
            store: Holds the snapshots of the run.
            directory: The run directory, in which the ledger is kept.
        """
        self.config = config
        self.runtime = runtime
        self.store = store
        self._kinds = (*REQUIRED_KINDS, HOOKS) if config.trainer.ema is None else TENSOR_KINDS
        self.last_step: int | None = None  # step of the newest committed snapshot
        # Seconds from the start of the last save until its snapshot was committed.
        self.durable_s: float | None = None
        self._failures = 0  # number of consecutive failed saves
        self._save: AsyncSave | None = None
        self._buffers: dict[str, SafetensorsBuffer] = {}
        self._shard_plan = ShardPlan(runtime, store)
        self._ledger = Ledger(directory)

    # Loading.

    def load_latest(self, check: Check) -> Snapshot | None:
        """Load the snapshot that the run resumes from, on every rank. A collective.

        This is the newest snapshot of the run. If the run has no snapshots, it is the snapshot that
        run.resume names. Return None if there is no snapshot at all. If each rank holds a shard of
        the state, the snapshot has no tensors yet: `read_shards` adds them.

        Args:
            check: Called on rank zero with the step and the state of the snapshot. Raises an
                exception if the run cannot use the snapshot.

        Raises:
            SnapshotError: There are snapshots, but the run cannot resume from any of them.
        """
        group = self.runtime.group
        whole = self.runtime.strategy.n_shards == 1
        if not whole:
            self._shard_plan.check_reach()

        def find() -> tuple[Snapshot | None, bool]:
            source = self.config.run.source
            newest = self.store.read_latest(self._kinds, whole)
            belongs_to_run = newest is not None
            if source and not belongs_to_run:
                newest = load(source, self._kinds, whole=whole)
            elif source:
                log.info("run.resume=%s is ignored, because the run has its own snapshots", source)
            if newest is not None:
                check(newest.step, newest.state)
            return newest, belongs_to_run

        newest, belongs_to_run = group.keep_on_rank_zero(find) or (None, False)
        meta: dict[str, Any] | None = None
        if newest is not None:
            values = {"step": newest.step, "state": newest.state, "index": newest.index}
            meta = {"values": values, "belongs_to_run": belongs_to_run}
        meta = group.broadcast_json(meta)
        if meta is None:
            return None
        tensors: dict[str, Any] = {}
        for kind in TENSOR_KINDS:
            tensors[kind] = group.broadcast_tensors(getattr(newest, kind) if newest else None)
        snapshot = Snapshot(**meta["values"], **tensors)
        self.last_step = snapshot.step if meta["belongs_to_run"] else None
        return snapshot

    def read_shards(self, snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> Snapshot:
        """Return a snapshot with the tensors of this rank's model and optimizer. A collective."""
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
            # This step is committed already, but older snapshots may have to be deleted.
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
        """Delete old snapshots on a thread, and send heartbeats meanwhile.

        Without heartbeats, a slow object store would be taken for a hang.
        """
        call = self.runtime.group.env.call_on_rank_zero
        thread = Thread(target=call, args=(retain,), name="retention", daemon=True)
        thread.start()
        self._join(thread)

    def _join(self, thread: Thread, until: float | None = None) -> None:
        """Wait for a thread and send heartbeats meanwhile.

        Args:
            until: The time.monotonic() at which to stop waiting. None waits until the thread ends.
        """
        while thread.is_alive() and (until is None or time.monotonic() < until):
            thread.join(0.05)
            self.runtime.group.set_activity("waiting for a snapshot")

    @property
    def is_staging(self) -> bool:
        """True while the tensors of the save in progress are being copied."""
        return self._save is not None and not self._save.staged.is_set()

    def wait_for_staging(self) -> None:
        """Wait until the tensors of the save in progress are copied, and may change again."""
        if self._save is None:
            return
        with self.runtime.group.waiting():  # copying from a GPU waits for its queued work
            self._save.staged.wait()

    @property
    def save_in_progress(self) -> bool:
        """True while the thread of a save is running on this rank."""
        return self._save is not None and self._save.is_alive()

    @property
    def quick_deadline(self) -> float:
        """The time.monotonic() at which to stop waiting for the save in progress.

        Training waits until this time if the next save is due already. 0.0 means: do not wait.
        """
        if self._save is None or (self.durable_s or 0.0) >= QUICK_SAVE_S:
            return 0.0
        return self._save.started_at + QUICK_SAVE_S

    def wait(self, until: float | None = None) -> bool:
        """Wait for the save in progress. A collective.

        Args:
            until: The time.monotonic() at which to stop waiting. None waits until the save ends.

        Returns:
            True if no save is in progress any more, on any rank.

        Raises:
            StorageUnavailableError: More than snapshot.max_failures saves in a row have failed. A
                restart may succeed.
            StorageUnusableError: More than snapshot.max_failures saves in a row have failed, and a
                restart would fail for the same reason.
            RunError: Another process has taken over the lease, or the run directory was deleted.
        """
        save = self._save
        if save is None:
            return True
        self._join(save, until)
        ranks_saving = self.runtime.group.all_reduce(torch.tensor([float(save.is_alive())]))
        if ranks_saving.item():
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
        is_lasting = failure.errno in LASTING_ERRNOS
        kind = StorageUnusableError if is_lasting else StorageUnavailableError
        return kind(
            f"cannot write the snapshot of step {step}: {self.store.url}: {failure}{times}; older "
            "snapshots are intact: fix this and run again"
        )
