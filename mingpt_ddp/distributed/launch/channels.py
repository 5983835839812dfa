"""Channels from workers to their launcher, for evaluations and for their output."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from mingpt_ddp.storage.lines import MAX_LINE_BYTES

# A pruner callback. It gets the step and the metrics of an evaluation by name, and returns the
# reason to end the run, or None to go on.
Judge: TypeAlias = Callable[[int, Mapping[str, float]], str | None]
# Environment variable of a worker: the descriptor of the channel, or -1 on ranks but zero.
REPORTS = "MINGPT_DDP_REPORTS"
MAX_MESSAGE_BYTES = MAX_LINE_BYTES  # size limit of a message with the metrics of an evaluation
MAX_CONSOLE_BYTES = 1 << 13


@dataclass(frozen=True)
class WorkerEnds:
    """The worker's ends of its channels. Multiprocessing passes them to the process."""

    reports: Connection | None  # None on all ranks but zero
    console: Connection | None  # None if the worker writes to the launcher's console
    is_judged: bool  # True if the launcher has a pruner callback for evaluations

    def open(self) -> None:
        """Write the console to the launcher, and leave the other end to `reporter`."""
        if self.console is not None:
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(self.console.fileno(), descriptor)
                # The old stream may be that of a file, which has a position.
                stream = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", closefd=False)
                setattr(sys, name, stream)
        if self.is_judged:
            descriptor = -1 if self.reports is None else os.dup(self.reports.fileno())
            os.environ[REPORTS] = str(descriptor)


def reporter() -> Judge | None:
    """Return the function that asks the launcher, on rank zero. None if no pruner is asked."""
    text = os.environ.pop(REPORTS, None)
    if text is None:
        return None
    connection = None if text == "-1" else Connection(int(text))

    def report(step: int, metrics: Mapping[str, float]) -> str | None:
        assert connection is not None, "called on another rank than zero"
        connection.send_bytes(json.dumps([step, {**metrics}]).encode())
        reason = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
        return None if reason is None else str(reason)

    return report


class Channels:
    """The launcher's ends of the channels to the workers of one attempt."""

    def __init__(self, report: Judge | None, has_console: bool) -> None:
        """
        Args:
            report: Called with each evaluation. None if the run reports none.
            has_console: True if the workers write to the console of this process.
        """
        self._report = report
        self._has_console = has_console
        self._output = b""  # the last bytes that the workers have written
        self._reports, self._worker_reports = multiprocessing.Pipe()
        self._console, self._worker_console = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> "Channels":
        return self

    def __exit__(self, *error: Any) -> None:
        self._close_worker_ends()
        self._reports.close()
        self._console.close()

    def for_worker(self, index: int) -> WorkerEnds:
        """Return the ends of the worker with this local rank."""
        return WorkerEnds(
            self._worker_reports if self._report and index == 0 else None,
            None if self._has_console else self._worker_console,
            self._report is not None,
        )

    def _close_worker_ends(self) -> None:
        self._worker_reports.close()
        self._worker_console.close()

    async def serve(
        self, joined: Coroutine[Any, Any, tuple[int, str]], workers: list[BaseProcess]
    ) -> tuple[int, str]:
        """Answer the reports of the workers until they have exited; return what `joined` does.

        An error of the function that judges them kills the workers, and is raised.
        """
        self._close_worker_ends()  # they have their own
        loop = asyncio.get_running_loop()
        loop.add_reader(self._console.fileno(), self._read_console)
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
            loop.remove_reader(self._console.fileno())

    def last_line(self) -> str:
        """Return the last line in which the workers said why they ended, or "" without one."""
        while self._read_console():
            pass
        lines = self._output.decode(errors="replace").splitlines()
        errors = [line for line in lines if "error" in line]
        return (errors or lines or [""])[-1].strip()

    async def _answer(self) -> None:
        if self._report is None:
            return
        while True:
            await readable([self._reports.fileno()])
            try:
                step, metrics = json.loads(self._reports.recv_bytes(MAX_MESSAGE_BYTES))
            except (EOFError, ConnectionError):  # the worker has exited
                return
            reason = self._report(step, metrics)
            with contextlib.suppress(ConnectionError):
                self._reports.send_bytes(json.dumps(reason).encode())

    def _read_console(self) -> bool:
        """Read some of the workers' output. Return True if there may be more."""
        descriptor = self._console.fileno()
        os.set_blocking(descriptor, False)
        try:
            content = os.read(descriptor, MAX_CONSOLE_BYTES)
        except BlockingIOError:
            return False
        self._output = (self._output + content)[-MAX_CONSOLE_BYTES:]
        if not content:  # all workers have closed it, so it stays readable
            asyncio.get_running_loop().remove_reader(descriptor)
        return bool(content)


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
