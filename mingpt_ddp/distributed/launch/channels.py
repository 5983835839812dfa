"""Channels from workers to their launcher: evaluations for a pruner, and the outcomes of jobs."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import select
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from mingpt_ddp.config.job import Outcome
from mingpt_ddp.errors import UserError
from mingpt_ddp.storage.lines import MAX_LINE_BYTES

# A pruner callback. It gets the step and the metrics of an evaluation by name, and returns the
# reason to end the run, or None to go on.
PrunerCallback: TypeAlias = Callable[[int, Mapping[str, float]], str | None]
MAX_MESSAGE_BYTES = MAX_LINE_BYTES  # size limit of a message with the metrics of an evaluation
# A write to a pipe is atomic up to PIPE_BUF bytes, so messages of different workers do not mix.
MAX_OUTCOME_BYTES = select.PIPE_BUF - 64


@dataclass(frozen=True)
class WorkerEnds:
    """The worker's ends of its channels. Multiprocessing passes them to the process."""

    reports: Connection | None  # None except on rank zero of a run with a pruner callback
    outcomes: Connection
    has_console: bool  # True if the worker writes to the launcher's console
    has_pruner: bool  # True if the launcher has a pruner callback for evaluations

    def open(self) -> None:
        """Discard the output of this worker, unless it writes to the launcher's console."""
        if not self.has_console:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(nowhere, descriptor)
                # Replace the stream too: the old one may have a position in a file.
                setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))

    def ask_pruner(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Ask the pruner callback of the launcher. Called on rank zero."""
        assert self.reports is not None
        self.reports.send_bytes(json.dumps([step, {**metrics}]).encode())
        reason = json.loads(self.reports.recv_bytes(MAX_MESSAGE_BYTES))
        return None if reason is None else str(reason)

    def send(self, outcome: Outcome) -> None:
        """Tell the launcher how the job has ended on this worker."""
        with contextlib.suppress(OSError):  # the launcher has died
            content = outcome.to_json().encode()
            if len(content) <= MAX_OUTCOME_BYTES:
                self.outcomes.send_bytes(content)


class Channels:
    """The launcher's ends of the channels to the workers, for one start of all workers."""

    def __init__(self, pruner: PrunerCallback | None, has_console: bool) -> None:
        """
        Args:
            pruner: Called with each evaluation. None outside of a search.
            has_console: True if the workers write to the console of this process.
        """
        self._pruner = pruner
        self._has_console = has_console
        self._reports, self._worker_reports = multiprocessing.Pipe()
        self._outcomes, self._worker_outcomes = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> "Channels":
        return self

    def __exit__(self, *error: Any) -> None:
        self._close_worker_ends()
        self._reports.close()
        self._outcomes.close()

    def for_worker(self, index: int) -> WorkerEnds:
        """Return the ends of the worker with this local rank."""
        return WorkerEnds(
            self._worker_reports if self._pruner and index == 0 else None,
            self._worker_outcomes,
            self._has_console,
            self._pruner is not None,
        )

    def _close_worker_ends(self) -> None:
        self._worker_reports.close()
        self._worker_outcomes.close()

    async def serve(
        self, joined: Coroutine[Any, Any, tuple[int, str]], workers: list[BaseProcess]
    ) -> tuple[int, str]:
        """Answer the reports of the workers until they have exited. Return the result of `joined`.

        If the pruner callback fails, kill the workers and raise its error.

        Args:
            joined: Waits until all workers have exited.
        """
        self._close_worker_ends()  # the workers have their own copies
        join = asyncio.ensure_future(joined)
        answer = asyncio.ensure_future(self._answer())
        try:
            await asyncio.wait({join, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and answer.exception() is not None:
                for worker in workers:
                    worker.kill()
            ended = await join
            if answer.done():
                answer.result()  # raises its error
            return ended
        finally:
            answer.cancel()

    def error(self) -> UserError | None:
        """Return the first error that a worker sent, or None. Call it after all workers exited."""
        errors = list[UserError]()
        with contextlib.suppress(EOFError):  # all outcomes have been read
            while self._outcomes.poll():
                outcome = Outcome.from_json(self._outcomes.recv_bytes(MAX_LINE_BYTES).decode())
                if outcome.error is not None:
                    errors.append(outcome.error)
        return errors[0] if errors else None

    async def _answer(self) -> None:
        """Send the reply of the pruner callback to each report, until the worker has exited."""
        if self._pruner is None:
            return
        while True:
            await readable([self._reports.fileno()])
            try:
                step, metrics = json.loads(self._reports.recv_bytes(MAX_MESSAGE_BYTES))
            except (EOFError, ConnectionError):  # the worker has exited
                return
            reason = self._pruner(step, metrics)
            with contextlib.suppress(ConnectionError):
                self._reports.send_bytes(json.dumps(reason).encode())


async def readable(descriptors: list[int], timeout_s: float | None = None) -> None:
    """Return when one of the descriptors is readable, or after the timeout."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    for descriptor in descriptors:
        loop.add_reader(descriptor, ready.set)
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ready.wait(), timeout_s)
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
