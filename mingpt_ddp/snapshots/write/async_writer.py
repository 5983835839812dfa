"""Write one snapshot on a thread of every rank, while training continues.

Training waits only for staging in host memory, and only before the next update of the weights:
Mohan et al. 2021, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing" (USENIX FAST).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import UserError
from mingpt_ddp.snapshots.format import HOOKS, kind_of
from mingpt_ddp.snapshots.hashes import HashByKind, describe_tensors, hash_lines
from mingpt_ddp.snapshots.hook_state import describe_states, refuse_other_states
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.write.ledger import Ledger
from mingpt_ddp.snapshots.write.store import SnapshotStore

log = logging.getLogger(__name__)

FileContents = dict[str, dict[str, Tensor] | bytes]  # by file name: tensors by name, or the content


@dataclass(frozen=True)
class Capture:
    """The files that this rank saves after a step."""

    step: int
    files: FileContents  # the tensors may change as soon as they are staged
    settings: str = ""  # digest of all settings that change the bits of the step, for the ledger


class AsyncSave(threading.Thread):
    """Stage, write and commit.

    Every rank runs this thread for the same step. An error on one rank is raised on all.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: SnapshotStore,
        buffers: dict[str, SafetensorsBuffer],
        capture: Capture,
        apply_retention: Callable[[], None],
        ledger: Ledger,
    ) -> None:
        """
        Args:
            buffers: Staging buffers by file name, reused by every snapshot.
            apply_retention: Called on rank zero after the commit. It must not raise an exception.
            ledger: Rank zero adds the hashes of the snapshot before the commit.
        """
        super().__init__(name=f"snapshot of step {capture.step}", daemon=True)
        self.runtime = runtime
        self.store = store
        self.buffers = buffers
        self.step = capture.step
        self.capture = capture
        self.apply_retention = apply_retention
        self.ledger = ledger
        self._contents: dict[str, memoryview | bytes] = {}  # staged content of this rank's files
        self._hashes: HashByKind = {}  # on rank zero: hashes of the tensors of all ranks
        self.staged = threading.Event()
        self.started_at = time.monotonic()
        self.duration_s = 0.0  # seconds from the start to the commit
        # The result, the same on every rank.
        self.failure: OSError | None = None  # error of the store
        self.error: Exception | None = None  # another error, which ends the run
        self._ready = {
            device: torch.cuda.current_stream(device).record_event()
            for device in self._devices()
            if device.type == "cuda"
        }

    def _devices(self) -> list[torch.device]:
        """List the device of this rank, and other devices that hold tensors of its model."""
        devices = [self.runtime.device]
        for content in self.capture.files.values():
            if isinstance(content, dict):
                devices += [tensor.device for tensor in content.values()]
        return [*dict.fromkeys(devices)]

    def run(self) -> None:
        group = self.runtime.group
        on_rank_zero = group.env.call_on_rank_zero
        try:
            group.io.decide_on_rank_zero(self._stage_and_describe, self._check_staged)
            record = partial(self.ledger.append, self.step, self._hashes, self.capture.settings)
            store = self.store
            write = partial(store.write_files, self.step, self._contents)
            commit = partial(store.commit, self.step, record=record)
            try:
                group.io.run_on_rank_zero(partial(store.begin, self.step))
                group.io.decide_on_rank_zero(write, commit)
            except OSError as error:
                self._note_failure(error)
            else:
                on_rank_zero(self.apply_retention)
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
            group.is_writing = False
            self.duration_s = time.monotonic() - self.started_at

    def _note_failure(self, error: OSError) -> None:
        """Keep the error of the store. Delete the files of this save, in case the disk is full."""
        self.failure = error
        # on an object store that fails, the deletion would fail too
        if self.store.storage.has_flock:
            with contextlib.suppress(OSError):
                self.runtime.group.env.call_on_rank_zero(partial(self.store.clear, self.step))

    def _stage(self) -> dict[str, memoryview | bytes]:
        """Copy the tensors to host memory, on a separate CUDA stream per GPU.

        Return the content of each file.
        """
        if self._ready:
            torch.cuda.set_device(self.runtime.device)  # a thread has its own current device
        files = self.capture.files
        tensors = {name: content for name, content in files.items() if isinstance(content, dict)}
        if not self._buffers_fit(tensors):
            self.buffers.clear()  # free the memory before allocating again
            for name, named in tensors.items():
                self.buffers[name] = SafetensorsBuffer(named)
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
        for name, content in files.items():
            staged = content if isinstance(content, bytes) else self.buffers[name].content
            if kind_of(name) == HOOKS:  # hooks have the same state on all ranks
                write = partial(contents.__setitem__, name, staged)
                self.runtime.group.env.call_on_rank_zero(write)
            else:
                contents[name] = staged
        self.capture = replace(self.capture, files={})  # free the tensors
        self.runtime.group.is_writing = True
        self.staged.set()
        return contents

    def _stage_and_describe(self) -> dict[str, Any]:
        """Stage the tensors. Describe them for rank zero, as JSON values."""
        self._contents = self._stage()
        described: dict[str, Any] = {"lines": {}, "hooks": {}}
        if self.runtime.strategy.weights != "rows":  # else no rank has a whole tensor
            for file, buffer in self.buffers.items():
                lines = describe_tensors(buffer.tensors)
                described["lines"][kind_of(file)] = lines
                if kind_of(file) == HOOKS:
                    described["hooks"] = describe_states(buffer.tensors, lines)
        return described

    def _check_staged(self, staged: list[dict[str, Any]]) -> None:
        """Hash what was staged.

        Args:
            staged: Descriptions of the staged tensors, one from each rank.

        Raises:
            CodeError: The state of a hook differs between the ranks.
        """
        refuse_other_states(self.step, [each["hooks"] for each in staged])
        for each in staged[1:]:
            each["lines"].pop(HOOKS, None)
        self._hashes = hash_lines(each["lines"] for each in staged)

    def _buffers_fit(self, tensors: dict[str, dict[str, Tensor]]) -> bool:
        if tensors.keys() != self.buffers.keys():
            return False
        return all(self.buffers[name].fits(named) for name, named in tensors.items())
