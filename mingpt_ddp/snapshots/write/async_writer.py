"""Write one snapshot on a thread of every rank, while training continues.

The tensors are first staged: copied to host memory. Training waits only for staging, and only
before the next update of the weights. The method is from Mohan et al. 2021, "CheckFreq: Frequent,
Fine-Grained DNN Checkpointing" (USENIX FAST).
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
from mingpt_ddp.snapshots.hook_state import describe_states, refuse_differing_states
from mingpt_ddp.snapshots.staging_buffer import SafetensorsBuffer
from mingpt_ddp.snapshots.write.ledger import Ledger
from mingpt_ddp.snapshots.write.store import SnapshotStore

log = logging.getLogger(__name__)

# The contents of files, by file name: named tensors for a safetensors file, bytes for any other
# file.
FileContents = dict[str, dict[str, Tensor] | bytes]


@dataclass(frozen=True)
class Capture:
    """The files that this rank writes for the snapshot of a step."""

    step: int
    files: FileContents  # the tensors may change as soon as they are staged
    settings_digest: str = ""  # from `digest_settings`, for the ledger. Only rank zero needs it


class AsyncSave(threading.Thread):
    """A thread that stages, writes and commits one snapshot.

    Every rank runs this thread for the same step. An error on one rank is raised on all ranks.
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
            buffers: Staging buffers by file name. Every snapshot of the run uses them again.
            apply_retention: Called on rank zero after the commit, to delete old snapshots. Must not
                raise an exception.
            ledger: Records the hashes of the snapshot, on rank zero, just before the commit.
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
        self._hashes: HashByKind = {}  # on rank zero: hashes of the tensors from all ranks
        self.staged = threading.Event()
        self.started_at = time.monotonic()
        self.duration_s = 0.0  # seconds from the start to the commit
        # The exception that ended the save, the same on every rank. A `failure` of the store counts
        # towards snapshot.max_failures. An `error` of any other kind ends the run.
        self.failure: OSError | None = None
        self.error: Exception | None = None
        # For each GPU, the point in its training stream from which the tensors can be copied.
        self._ready = {
            device: torch.cuda.current_stream(device).record_event()
            for device in self._devices()
            if device.type == "cuda"
        }

    def _devices(self) -> list[torch.device]:
        """List the device of this rank, and all other devices that hold tensors of its model."""
        devices = [self.runtime.device]
        for content in self.capture.files.values():
            if isinstance(content, dict):
                devices += [tensor.device for tensor in content.values()]
        return [*dict.fromkeys(devices)]

    def run(self) -> None:
        group = self.runtime.group
        on_rank_zero = group.env.call_on_rank_zero
        try:
            group.snapshot_collectives.decide_on_rank_zero(
                self._stage_and_describe, self._check_staged
            )
            record = partial(
                self.ledger.append, self.step, self._hashes, self.capture.settings_digest
            )
            store = self.store
            write = partial(store.write_files, self.step, self._contents)
            commit = partial(store.commit, self.step, record=record)
            try:
                group.snapshot_collectives.run_on_rank_zero(partial(store.begin, self.step))
                group.snapshot_collectives.decide_on_rank_zero(write, commit)
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
        # If an object store fails, deleting files there would fail too.
        if self.store.storage.has_flock:
            with contextlib.suppress(OSError):
                self.runtime.group.env.call_on_rank_zero(partial(self.store.clear, self.step))

    def _stage(self) -> dict[str, memoryview | bytes]:
        """Copy the tensors to host memory, on a separate CUDA stream for each GPU.

        Return the content of each file that this rank writes.
        """
        if self._ready:
            torch.cuda.set_device(self.runtime.device)  # each thread has its own current device
        files = self.capture.files
        tensors = {name: content for name, content in files.items() if isinstance(content, dict)}
        if not self._buffers_fit(tensors):
            self.buffers.clear()  # free the memory before allocating again
            for name, named in tensors.items():
                self.buffers[name] = SafetensorsBuffer(named)
        streams = [torch.cuda.Stream(device) for device in self._ready]
        # A copy runs on the current stream of the tensor's GPU.
        with contextlib.ExitStack() as current:
            for stream, event in zip(streams, self._ready.values(), strict=True):
                # Wait for the work that was queued on the training stream before the snapshot.
                stream.wait_event(event)
                current.enter_context(torch.cuda.stream(stream))
            for name, buffer in self.buffers.items():
                buffer.fill(tensors[name])
        for stream in streams:
            stream.synchronize()
        contents: dict[str, memoryview | bytes] = {}
        for name, content in files.items():
            staged = content if isinstance(content, bytes) else self.buffers[name].content
            # Hooks have the same state on all ranks, so only rank zero writes it.
            if kind_of(name) == HOOKS:
                write = partial(contents.__setitem__, name, staged)
                self.runtime.group.env.call_on_rank_zero(write)
            else:
                contents[name] = staged
        self.capture = replace(self.capture, files={})  # frees the tensors
        self.runtime.group.is_writing = True
        self.staged.set()
        return contents

    def _stage_and_describe(self) -> dict[str, Any]:
        """Stage the tensors. Return descriptions of them for rank zero, as JSON values."""
        self._contents = self._stage()
        described: dict[str, Any] = {"lines": {}, "hooks": {}}
        # If each rank holds rows of the weights, no rank has a whole tensor to hash.
        if self.runtime.strategy.weights != "rows":
            for file, buffer in self.buffers.items():
                lines = describe_tensors(buffer.tensors)
                described["lines"][kind_of(file)] = lines
                if kind_of(file) == HOOKS:
                    described["hooks"] = describe_states(buffer.tensors, lines)
        return described

    def _check_staged(self, staged: list[dict[str, Any]]) -> None:
        """Compute the hashes of the snapshot. Check that hooks have the same state on all ranks.

        Args:
            staged: For each rank, the value that `_stage_and_describe` returned.

        Raises:
            CodeError: The state of a hook differs between the ranks.
        """
        refuse_differing_states(self.step, [each["hooks"] for each in staged])
        for each in staged[1:]:
            each["lines"].pop(HOOKS, None)
        self._hashes = hash_lines(each["lines"] for each in staged)

    def _buffers_fit(self, tensors: dict[str, dict[str, Tensor]]) -> bool:
        """Return True if the staging buffers of the last snapshot can hold these tensors."""
        if tensors.keys() != self.buffers.keys():
            return False
        return all(self.buffers[name].fits(named) for name, named in tensors.items())
