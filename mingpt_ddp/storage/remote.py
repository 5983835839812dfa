"""Files on any remote fsspec filesystem: a timeout per request, retries, and a deadline per operation.

Both limits grow with the bytes that move. Until its deadline an operation retries transient errors (5xx, throttling,
resets, timeouts) with random exponential backoff. Permanent errors are raised at once: a missing file or bucket, bad
credentials, no permission.
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

REQUEST_TIMEOUT_S = 30.0  # seconds for one request, in addition to its bytes / MIN_BANDWIDTH
OPERATION_DEADLINE_S = 60.0  # seconds for one operation with all its retries, in addition to its bytes / MIN_BANDWIDTH
MIN_BANDWIDTH = 1 << 20  # bytes per second that all requests together are assumed to move at least
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0  # before a retry; doubled each time
PART = 1 << 24  # bytes: larger files are moved in parts of this size, so that a fault costs one part
PARALLEL = 4  # parts that move, and are in memory, at the same time

_RETRY_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "Throttling", "XAmzContentSHA256Mismatch"}
_RETRY_STATUS = {408, 409, 425, 429}
_PERMANENT_STATUS = {501, 507}  # not implemented; full
_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
# Exceptions of packages that may not be installed, by name.
_RETRY_NAMES = {
    *("aiohttp.client_exceptions.ClientError", "botocore.parsers.ResponseParserError"),
    *(f"botocore.exceptions.{name}" for name in ("ConnectionError", "HTTPClientError", "IncompleteReadError")),
}
_jitter = random.SystemRandom()  # leaves the seeded generators of a run alone


class StorageError(OSError):
    """An operation failed for good or until its deadline; the message is one line without credentials."""


def http_status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return the HTTP status and the store's error code behind an exception, or None for what it does not have."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code")
        cause = cause.__cause__
    numbers = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((number for number in numbers if isinstance(number, int)), None), None


def is_transient(error: Exception) -> bool:
    """Return whether a retry of the same request may succeed."""
    status, code = http_status_and_code(error)
    if status is not None:
        transient = status >= 500 or status in _RETRY_STATUS or code in _RETRY_CODES
        return transient and status not in _PERMANENT_STATUS
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, (OSError, EOFError, asyncio.TimeoutError)):
        return True
    return any(f"{kind.__module__}.{kind.__qualname__}" in _RETRY_NAMES for kind in type(error).__mro__)


def redact(text: str) -> str:
    """Return the text as one line of at most 300 characters, without the passwords and signatures of URLs in it."""
    text = re.sub(r"://[^/@\s]*@", "://***@", " ".join(text.split()))
    return re.sub(r"\?[\w%.-]+=[^\s\"']*", "?***", text)[:300]


def describe(error: BaseException) -> str:
    """Return the store's error code, or the exception's name, and its message."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "no answer in time"
    name = http_status_and_code(error)[1] or type(error).__name__
    return f"{name}: {getattr(error, 'strerror', None) or error}"


class RetryPolicy:
    """Retries the requests of one operation until they succeed, fail for good or are cancelled."""

    def __init__(self) -> None:
        self.last_error: Exception | None = None  # that was retried

    async def __call__(self, request: Callable[[], Awaitable[T]], size: int = 0) -> T:
        """Return the result of a request that moves `size` bytes."""
        backoff = INITIAL_BACKOFF_S
        while True:
            try:
                return await asyncio.wait_for(request(), REQUEST_TIMEOUT_S + PARALLEL * size / MIN_BANDWIDTH)
            except Exception as error:  # every filesystem raises types of its own
                if not is_transient(error):
                    raise
                # One line per operation, since all parts of a large file fail together.
                log.log(logging.DEBUG if self.last_error else logging.INFO, "retrying: %s", redact(describe(error)))
                self.last_error = error
            await asyncio.sleep(backoff * _jitter.uniform(0.5, 1))
            backoff = min(2 * backoff, MAX_BACKOFF_S)


async def in_parallel(jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Return the results of all jobs, of which PARALLEL run at a time; if one fails, cancel the others."""
    semaphore = asyncio.Semaphore(PARALLEL)

    async def run(job: Callable[[], Awaitable[T]]) -> T:
        async with semaphore:
            return await job()

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RemoteFiles:
    """The files of an fsspec filesystem, by path.

    All methods raise StorageError, and FileNotFoundError if there is no such file.
    """

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.loop = fs.loop if fs.async_impl else fsspec.asyn.get_loop()
        self._until = math.inf  # time.monotonic() of the deadline of all operations
        self._running: set[asyncio.Future[Any]] = set()

    def set_deadline(self, seconds: float) -> None:
        """Let all operations, running and later ones, fail after this many seconds from now."""
        self._until = time.monotonic() + seconds
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, self._cancel_all)

    def _cancel_all(self) -> None:
        for operation in self._running:
            operation.cancel()

    def read(self, path: str, limit: int | None = None, expected_size: int | None = None) -> bytes:
        size = self._info(path)["size"] if expected_size is None else expected_size
        if size is None:  # a web server that sends no Content-Length
            return bytes(self._request("read", "cat_file", path, end=limit))
        size = size if limit is None else min(size, limit)
        parts = [(start, min(start + PART, size)) for start in range(0, size, PART)]

        async def ranges(retry: RetryPolicy) -> list[bytes]:
            return await in_parallel([partial(self._range, retry, path, *part) for part in parts])

        return b"".join(self._run("read", path, ranges, size))

    def chunks(self, path: str, step: int, expected_size: int | None = None) -> Iterator[bytes]:
        size = self._info(path)["size"] if expected_size is None else expected_size
        for start in range(0, size, step):
            end = min(start + step, size)
            yield self._run("read", path, partial(self._range, path=path, start=start, end=end), end - start)

    def write(self, path: str, content: memoryview) -> None:
        self._run("write", path, lambda retry: self._write(retry, path, content), len(content))

    def put_if_absent(self, path: str, content: memoryview) -> bool:
        if self.size(path) is not None:
            return False

        async def operation(retry: RetryPolicy) -> bool:
            try:
                await retry(lambda: self._put_if_absent(path, content), len(content))
            except FileExistsError:
                # It may be this call's own, by a request whose answer was lost; HTTP clients retry a PUT as well.
                return await retry(lambda: self._call("cat_file", path)) == content
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
        self._run("delete", path, lambda retry: self._delete(retry, path))

    def _info(self, path: str) -> dict[str, Any]:
        self.fs.invalidate_cache()
        return dict(self._request("look at", "info", path))

    def _request(self, what: str, method: str, path: str, **kwargs: Any) -> Any:
        """Run an operation that is one request and moves few bytes."""
        return self._run(what, path, lambda retry: retry(lambda: self._call(method, path, **kwargs)))

    def _run(self, what: str, path: str, operation: Callable[[RetryPolicy], Awaitable[T]], size: int = 0) -> T:
        """Run an operation that moves `size` bytes until it ends or its deadline passes."""
        retry = RetryPolicy()
        seconds = min(OPERATION_DEADLINE_S + size / MIN_BANDWIDTH, max(0.0, self._until - time.monotonic()))

        async def bounded() -> T:
            running = asyncio.ensure_future(operation(retry))
            self._running.add(running)
            try:
                return await asyncio.wait_for(running, seconds)
            except asyncio.CancelledError:
                raise TimeoutError from None
            finally:
                self._running.discard(running)

        try:
            # This timeout is for an event loop that hangs; the cleanup after a failure takes some time as well.
            result: T = fsspec.asyn.sync(self.loop, bounded, timeout=seconds + 2 * REQUEST_TIMEOUT_S)
        except Exception as error:
            is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            if is_missing and http_status_and_code(error)[1] != "NoSuchBucket":
                raise
            timed_out = isinstance(error, (TimeoutError, asyncio.TimeoutError, fsspec.FSTimeoutError))
            cause = describe((timed_out and retry.last_error) or error)
            tried = f" (tried for {seconds:.0f} s)" if timed_out else ""
            raise StorageError(redact(f"cannot {what} {self.fs.unstrip_protocol(path)}: {cause}") + tried) from error
        return result

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.fs.async_impl:
            return await getattr(self.fs, f"_{method}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self.fs, method), *args, **kwargs)

    async def _range(self, retry: RetryPolicy, path: str, start: int, end: int) -> bytes:
        async def request() -> bytes:
            content: bytes = await self._call("cat_file", path, start=start, end=end)
            if len(content) != end - start:
                raise EOFError(f"{len(content)} of {end - start} bytes arrived")
            return content

        return await retry(request, end - start)

    async def _write(self, retry: RetryPolicy, path: str, content: memoryview) -> None:
        await retry(lambda: self._call("pipe_file", path, bytes(content)), len(content))

    async def _put_if_absent(self, path: str, content: memoryview) -> None:
        """Write the file unless it exists.

        Raises:
            FileExistsError: it exists.
        """
        method = self.fs._pipe_file if self.fs.async_impl else self.fs.pipe_file
        exclusive = {"mode": "create"} if "mode" in inspect.signature(method).parameters else {}
        await self._call("pipe_file", path, bytes(content), **exclusive)

    async def _delete(self, retry: RetryPolicy, path: str) -> None:
        async def request() -> None:
            if await self._call("exists", path):
                await self._call("rm", path, recursive=True)

        await retry(request)
