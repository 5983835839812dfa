"""Write one snapshot on a thread of every rank, while training continues.

Training waits only for staging in host memory, and only before the next update of the weights:
Mohan et al. 2021, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing" (USENIX FAST).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import UserError
from mingpt_ddp.snapshots.format import Files
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.store import SnapshotStore

log = logging.getLogger(__name__)

Parts = dict[str, dict[str, Tensor] | bytes]  # by file name: tensors by name, or the content


@dataclass(frozen=True)
class StoreFailure:
    """A store that could not be written."""

    url: str
    error: OSError

    def __str__(self) -> str:
        return f"{self.url}: {self.error}"


class AsyncSave(threading.Thread):
    """Stage, write, commit.

    Every rank runs this thread for the same step; an error on one rank is raised on all.
    """

    def __init__(
        self,
        runtime: Runtime,
        stores: list[SnapshotStore],
        buffers: dict[str, SafetensorsBuffer],
        step: int,
        parts: Parts,
        apply_retention: Callable[[SnapshotStore], None],
    ) -> None:
        """
        Args:
            stores: where to write; each is a fallback for the one before.
            buffers: staging buffers by file name, reused by every snapshot.
            parts: this rank's files. The tensors may change as soon as `staged` is set.
            apply_retention: called on rank zero with the store of the commit; must not raise.
        """
        super().__init__(name=f"snapshot of step {step}", daemon=True)
        self.runtime = runtime
        self.stores = stores
        self.buffers = buffers
        self.step = step
        self.parts = parts
        self.apply_retention = apply_retention
        self.staged = threading.Event()
        self.started_at = time.monotonic()
        self.duration_s = 0.0  # from the start to the commit
        # The result, the same on every rank.
        self.url: str | None = None  # of the store that holds the snapshot
        self.failure: StoreFailure | None = None  # of the first store that failed
        self.error: Exception | None = None  # ends the run
        gpus = [device for device in runtime.devices if device.type == "cuda"]
        self._ready = {device: torch.cuda.current_stream(device).record_event() for device in gpus}

    def run(self) -> None:
        group = self.runtime.group
        try:
            with group.raise_everywhere():
                contents = self._stage()
            for store in self.stores:
                try:
                    with group.raise_everywhere():
                        group.env.call_on_rank_zero(partial(store.begin, self.step))
                    with group.raise_everywhere():
                        own = store.write_files(self.step, contents)
                    written = group.all_gather(own, io=True)
                    files: Files = {}
                    for of_rank in written:
                        files.update(sorted(of_rank.items()))
                    with group.raise_everywhere():
                        group.env.call_on_rank_zero(partial(store.commit, self.step, files))
                except OSError as error:
                    self.failure = self.failure or StoreFailure(store.url, error)
                    # free a full disk; a failing object store would fail the deletion too
                    if store.storage.local:
                        with contextlib.suppress(OSError):
                            group.env.call_on_rank_zero(partial(store.clear, self.step))
                else:
                    group.env.call_on_rank_zero(partial(self.apply_retention, store))
                    self.url = store.url
                    break
        except Exception as error:  # SnapshotManager.wait raises it on the training thread
            self.error = error
            if not isinstance(error, UserError):
                log.info(
                    "the snapshot of step %d failed",
                    self.step,
                    exc_info=error,
                    extra={"file_only": True},
                )
        finally:
            self.staged.set()
            self.duration_s = time.monotonic() - self.started_at

    def _stage(self) -> dict[str, memoryview | bytes]:
        """Copy the tensors to host memory, on a separate CUDA stream per GPU.

        Return the content of each file.
        """
        tensors = {name: part for name, part in self.parts.items() if isinstance(part, dict)}
        if not self._buffers_fit(tensors):
            self.buffers.clear()  # free the memory before allocating again
            for name, named in tensors.items():
                self.buffers[name] = SafetensorsBuffer(named)
        if self._ready:
            torch.cuda.set_device(self.runtime.device)  # of this thread
        streams = [torch.cuda.Stream(device) for device in self._ready]
        # a copy runs on the current stream of its tensor's GPU
        with contextlib.ExitStack() as current:
            for stream, event in zip(streams, self._ready.values(), strict=True):
                stream.wait_event(event)  # work queued on the training stream before the snapshot
                current.enter_context(torch.cuda.stream(stream))
            for name, buffer in self.buffers.items():
                buffer.fill(tensors[name])
        for stream in streams:
            stream.synchronize()
        contents: dict[str, memoryview | bytes] = {}
        for name, part in self.parts.items():
            contents[name] = part if isinstance(part, bytes) else self.buffers[name].content
        self.parts = {}
        self.staged.set()
        return contents

    def _buffers_fit(self, tensors: dict[str, dict[str, Tensor]]) -> bool:
        if tensors.keys() != self.buffers.keys():
            return False
        return all(self.buffers[name].fits(named) for name, named in tensors.items())
