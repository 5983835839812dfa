"""One snapshot on its way to the storage, beside training.

Training waits only until the state has been copied to host memory, and it may run on until it wants to change the
weights: Mohan et al. 2021, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing" (USENIX FAST). Hashing, writing and
the commit follow on a thread of every rank.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import UserError
from mingpt_ddp.snapshots.buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.format import STATE
from mingpt_ddp.snapshots.store import SnapshotStore

log = logging.getLogger(__name__)

Tensors = dict[str, dict[str, Tensor]]  # by file and name


@dataclass(frozen=True)
class SaveResult:
    """What became of a snapshot: the same on every rank, but for the seconds."""

    step: int
    seconds: float  # from the start of the copy to the commit
    place: str | None  # the URL where it was committed; None: nowhere
    problem: str | None  # why it was not at the first place
    fatal: Exception | None = None  # why the run cannot go on


class StagingBuffers:
    """Host memory for one copy of this rank's share of the state, used again by every snapshot."""

    def __init__(self) -> None:
        self._images: dict[str, SafetensorsBuffer] = {}

    def images(self, tensors: Tensors) -> dict[str, SafetensorsBuffer]:
        """An image for every file, with room for these tensors."""
        if tensors.keys() != self._images.keys() or not all(self._images[n].fits(t) for n, t in tensors.items()):
            self._images.clear()  # first give back, then take
            self._images = {name: SafetensorsBuffer(named) for name, named in tensors.items()}
        return self._images


class AsyncSave(threading.Thread):
    """Copy, write, commit. Every rank has one of them for the same step; they work in step with each other."""

    def __init__(
        self,
        runtime: Runtime,
        stores: list[SnapshotStore],
        keeper: StagingBuffers,
        step: int,
        tensors: Tensors,
        state: bytes,
        apply_retention: Callable[[SnapshotStore], None],
    ) -> None:
        """
        Args:
            stores: where to write; each is tried when the one before has failed.
            tensors: this rank's files. They may change when `copied` is set.
            state: the content of state.json.
            apply_retention: what rank 0 does with a store after a commit.
        """
        super().__init__(name=f"snapshot of step {step}", daemon=True)
        self.runtime, self.stores, self.keeper = runtime, stores, keeper
        self.step, self.tensors, self.state, self.apply_retention = step, tensors, state, apply_retention
        self.staging_done = threading.Event()
        self.began = time.monotonic()
        self.outcome: SaveResult | None = None
        self._contents: dict[str, memoryview | bytes] = {}
        device = runtime.device
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def run(self) -> None:
        problem = place = fatal = None
        try:
            with self.runtime.group.raise_everywhere():
                self._copy()
            for store in self.stores:
                try:
                    self._write(store)
                    place = store.url
                    break
                except OSError as error:
                    problem = problem or f"{store.url}: {error}"
                    self._clean_up(store)
        except Exception as error:  # training hears of it at its next step
            fatal = error
            if not isinstance(error, UserError):
                log.info("the snapshot of step %d failed", self.step, exc_info=error, extra={"file_only": True})
        finally:
            self.staging_done.set()
            self.outcome = SaveResult(self.step, time.monotonic() - self.began, place, problem, fatal)

    def _clean_up(self, store: SnapshotStore) -> None:
        """A disk that is full needs what the failure left; an object store that is away would only be waited for."""
        if self.runtime.group.is_rank_zero and store.storage.local:
            with contextlib.suppress(OSError):
                store.clear(self.step)

    def _copy(self) -> None:
        """Into host memory; on a GPU beside the work that is queued there, but after what was queued before."""
        images = self.keeper.images(self.tensors)
        if self._ready is None:
            self._fill(images)
        else:
            torch.cuda.set_device(self.runtime.device)  # of this thread
            stream = torch.cuda.Stream(self.runtime.device)
            stream.wait_event(self._ready)
            with torch.cuda.stream(stream):
                self._fill(images)
            stream.synchronize()
        self.tensors = {}
        self.staging_done.set()
        self._contents = {name: image.content for name, image in images.items()}
        if self.runtime.group.is_rank_zero:
            self._contents[STATE] = self.state

    def _fill(self, images: dict[str, SafetensorsBuffer]) -> None:
        for name, image in images.items():
            image.fill(self.tensors[name])

    def _write(self, store: SnapshotStore) -> None:
        """Only when all ranks have done one stage does the next begin; an error of one is an error of all."""
        group = self.runtime.group
        with group.raise_everywhere():
            group.env.call_on_rank_zero(lambda: store.clear(self.step))
        with group.raise_everywhere():
            written = store.write_files(self.step, self._contents)
        files = {name: file for part in group.all_gather(written, io=True) for name, file in sorted(part.items())}
        with group.raise_everywhere():
            manifest = group.env.call_on_rank_zero(lambda: store.make_manifest(self.step, files))
            store.write_files(self.step, manifest or {})
        if manifest:
            try:
                self.apply_retention(store)
            except Exception as error:  # the new one is there all the same
                log.warning("cannot delete older snapshots at %s: %s", store.url, error)
