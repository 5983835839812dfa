"""Files in object stores and on other remote filesystems, by calls that always end.

Every request has a limit of time and every operation a budget, both of which grow with the bytes that move. Within its
budget an operation tries again, with growing and random pauses, whatever may pass: 5xx, throttling, resets, time-outs.
What does not pass is told at once: a file or bucket that is not there, bad credentials, no permission.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import fsspec.asyn

log = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0  # limit of one request in seconds, apart from the bytes it moves
OPERATION_DEADLINE_S = (
    60.0  # limit of one operation in seconds with all that it tries again, apart from the bytes it moves
)
MIN_BANDWIDTH = 1 << 20  # bytes per second, of all requests together: with less, limits are exceeded
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0  # before a request is tried again; doubled each time
PART = 1 << 24  # bytes: larger files are moved in parts of this size, and a fault costs one part
PARALLEL = 4  # parts at the same time, so this many are in memory

_PASSING_CODES = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "XAmzContentSHA256Mismatch",
}
_PASSING_STATUS = {408, 409, 425, 429}
_LASTING_STATUS = {501, 507}  # not implemented; full
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
# Neither package may be there, so that their errors are expected_size by name.
_PASSING_NAMES = {
    *("aiohttp.client_exceptions.ClientError", "botocore.parsers.ResponseParserError"),
    *(f"botocore.exceptions.{name}" for name in ("ConnectionError", "HTTPClientError", "IncompleteReadError")),
}
_jitter = random.SystemRandom()  # apart from the random numbers of a run


class StorageError(OSError):
    """A store does not do what it was asked, also when asked again. The message is one line without credentials."""


def http_status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the store's own error code behind an exception, where there are any."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code")
        cause = cause.__cause__
    numbers = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((number for number in numbers if isinstance(number, int)), None), None


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    status, code = http_status_and_code(error)
    if status is not None:
        passing = status >= 500 or status in _PASSING_STATUS or code in _PASSING_CODES
        return passing and status not in _LASTING_STATUS
    if isinstance(error, _LASTING):
        return False
    if isinstance(error, (OSError, EOFError, asyncio.TimeoutError)):
        return True
    return any(f"{kind.__module__}.{kind.__qualname__}" in _PASSING_NAMES for kind in type(error).__mro__)


def redact(text: str) -> str:
    """One line of 300 characters or less, without the passwords and signatures that a URL may carry."""
    text = re.sub(r"://[^/@\s]*@", "://***@", " ".join(text.split()))
    return re.sub(r"\?[\w%.-]+=[^\s\"']*", "?***", text)[:300]


def describe(error: BaseException) -> str:
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "no answer in time"
    name = http_status_and_code(error)[1] or type(error).__name__
    return f"{name}: {getattr(error, 'strerror', None) or error}"


class RetryPolicy:
    """Tries requests again for as long as whoever started the operation lets it run."""

    def __init__(self) -> None:
        self.last: Exception | None = None  # what the most recent retry was for

    async def __call__(self, request: Callable[[], Awaitable[T]], size: int = 0) -> T:
        """The result of a request that moves `size` bytes."""
        pause = INITIAL_BACKOFF_S
        while True:
            try:
                return await asyncio.wait_for(request(), REQUEST_TIMEOUT_S + PARALLEL * size / MIN_BANDWIDTH)
            except Exception as error:  # every filesystem fails in its own way
                if not is_transient(error):
                    raise
                # One line an operation: all parts of a large file fail together.
                log.log(logging.DEBUG if self.last else logging.INFO, "trying again: %s", redact(describe(error)))
                self.last = error
            await asyncio.sleep(pause * _jitter.uniform(0.5, 1))
            pause = min(2 * pause, MAX_BACKOFF_S)


async def in_parallel(jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all jobs, a few of which run at a time; when one fails, none is left running."""
    gate = asyncio.Semaphore(PARALLEL)

    async def admitted(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    tasks = [asyncio.ensure_future(admitted(job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RemoteFiles:
    """The files of an fsspec filesystem, by path.

    All methods raise StorageError, and FileNotFoundError where there is no such file.
    """

    def __init__(self, fs: Any, url: str) -> None:
        self.fs = fs
        self.url = url
        self.loop = fs.loop if fs.async_impl else fsspec.asyn.get_loop()
        self._until = math.inf  # time.monotonic() after which nothing is tried any more
        self._running: set[asyncio.Future[Any]] = set()

    def set_deadline(self, seconds: float) -> None:
        """Give up whatever is not done by then, now and later."""
        self._until = time.monotonic() + seconds
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, self._give_up)

    def _give_up(self) -> None:
        for operation in self._running:
            operation.cancel()

    def read(self, path: str, limit: int | None = None, expected_size: int | None = None) -> bytes:
        size = self._info(path)["size"] if expected_size is None else expected_size
        if size is None:  # some web servers do not tell
            content: bytes = self._request("read", "cat_file", path, end=limit)
            return content
        size = size if limit is None else min(size, limit)
        parts = [(start, min(start + PART, size)) for start in range(0, size, PART)]

        async def ranges(attempt: RetryPolicy) -> list[bytes]:
            return await in_parallel([partial(self._range, attempt, path, *part) for part in parts])

        return b"".join(self._run("read", path, ranges, size))

    def chunks(self, path: str, step: int, expected_size: int | None = None) -> Iterator[bytes]:
        size = self._info(path)["size"] if expected_size is None else expected_size
        for start in range(0, size, step):
            end = min(start + step, size)
            yield self._run("read", path, partial(self._range, path=path, start=start, end=end), end - start)

    def write(self, path: str, content: memoryview) -> None:
        self._run("write", path, lambda attempt: self._write(attempt, path, content), len(content))

    def put_if_absent(self, path: str, content: memoryview) -> bool:
        if self.size(path) is not None:
            return False

        async def operation(attempt: RetryPolicy) -> bool:
            try:
                await attempt(lambda: self._put_if_absent(path, content), len(content))
            except FileExistsError:
                # It may be ours, of a request whose answer was lost: also HTTP clients send a PUT a second time.
                return await attempt(lambda: self._call("cat_file", path)) == content
            return True

        return self._run("create", path, operation, len(content))

    def size(self, path: str) -> int | None:
        try:
            info = self._info(path)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def list(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            entries: list[str] = self._request("list", "ls", path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (entry.rstrip("/") for entry in entries)
        own = path.strip("/")
        return sorted(name.rsplit("/", 1)[-1] for name in names if name.strip("/") != own)

    def delete(self, path: str) -> None:
        self.fs.invalidate_cache()
        self._run("delete", path, lambda attempt: self._delete(attempt, path))

    def _info(self, path: str) -> dict[str, Any]:
        self.fs.invalidate_cache()
        info: dict[str, Any] = self._request("look at", "info", path)
        return info

    def _request(self, what: str, method: str, path: str, **kwargs: Any) -> Any:
        """An operation that is one request and moves few bytes."""
        return self._run(what, path, lambda attempt: attempt(lambda: self._call(method, path, **kwargs)))

    def _run(self, what: str, path: str, operation: Callable[[RetryPolicy], Awaitable[T]], size: int = 0) -> T:
        """Run an operation that moves `size` bytes to its end, or to the end of its budget."""
        attempt = RetryPolicy()
        budget = min(OPERATION_DEADLINE_S + size / MIN_BANDWIDTH, max(0.0, self._until - time.monotonic()))

        async def bounded() -> T:
            running = asyncio.ensure_future(operation(attempt))
            self._running.add(running)
            try:
                return await asyncio.wait_for(running, budget)
            except asyncio.CancelledError:
                raise TimeoutError from None
            finally:
                self._running.discard(running)

        try:
            # The limit out here is for a loop that does not run any more; what follows a failure takes some time too.
            result: T = fsspec.asyn.sync(self.loop, bounded, timeout=budget + 2 * REQUEST_TIMEOUT_S)
        except Exception as error:
            if (
                isinstance(error, (FileNotFoundError, NotADirectoryError))
                and http_status_and_code(error)[1] != "NoSuchBucket"
            ):
                raise
            timed_out = isinstance(error, (TimeoutError, asyncio.TimeoutError, fsspec.FSTimeoutError))
            cause = describe((timed_out and attempt.last) or error)
            tried = f" (tried for {budget:.0f} s)" if timed_out else ""
            raise StorageError(redact(f"cannot {what} {self.fs.unstrip_protocol(path)}: {cause}") + tried) from error
        return result

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.fs.async_impl:
            return await getattr(self.fs, f"_{method}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self.fs, method), *args, **kwargs)

    async def _range(self, attempt: RetryPolicy, path: str, start: int, end: int) -> bytes:
        async def request() -> bytes:
            content: bytes = await self._call("cat_file", path, start=start, end=end)
            if len(content) != end - start:
                raise EOFError(f"{len(content)} of {end - start} bytes arrived")
            return content

        return await attempt(request, end - start)

    async def _write(self, attempt: RetryPolicy, path: str, content: memoryview) -> None:
        await attempt(lambda: self._call("pipe_file", path, bytes(content)), len(content))

    async def _put_if_absent(self, path: str, content: memoryview) -> None:
        """
        Raises:
            FileExistsError: there is a file already.
        """
        method = self.fs._pipe_file if self.fs.async_impl else self.fs.pipe_file
        exclusive = {"mode": "create"} if "mode" in inspect.signature(method).parameters else {}
        await self._call("pipe_file", path, bytes(content), **exclusive)

    async def _delete(self, attempt: RetryPolicy, path: str) -> None:
        async def request() -> None:
            if await self._call("exists", path):
                await self._call("rm", path, recursive=True)

        await attempt(request)
