"""Files on any remote fsspec filesystem: a timeout per request, retries, and a deadline per operation.

Both limits grow with the bytes that move. Until its deadline an operation retries transient errors (5xx, throttling,
resets, timeouts) with random exponential backoff. Permanent errors are raised at once: a missing file or bucket, bad
credentials, no permission.
"""

import asyncio
import inspect
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import fsspec.asyn

from mingpt_ddp.storage.storage import Content, Storage

log = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0  # seconds for one request, in addition to its bytes / MIN_BANDWIDTH
OPERATION_DEADLINE_S = 60.0  # seconds for one operation with all its retries, in addition to its bytes / MIN_BANDWIDTH
MIN_BANDWIDTH = 1 << 20  # bytes per second that all requests together are assumed to move at least
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0  # before a retry; doubled each time
DEADLINE_CHECK_S = 0.5  # `set_deadline` ends an operation under way within this
PART = 1 << 24  # bytes: larger files are moved in parts of this size, so that a fault costs one part
PARALLEL = 4  # parts that move, and are in memory, at the same time

_RETRY_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "Throttling", "XAmzContentSHA256Mismatch"}
_RETRY_STATUS = {408, 409, 425, 429}
_PERMANENT_STATUS = {501, 507}  # not implemented; full
_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
# Of aiohttp and botocore, which may not be installed, the exceptions that are no OSError.
_RETRY_NAMES = {"ClientError", "ConnectionError", "HTTPClientError", "IncompleteReadError", "ResponseParserError"}
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
    return any(kind.__name__ in _RETRY_NAMES for kind in type(error).__mro__)


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
    """Retries the requests of one operation until they succeed, fail for good or are cancelled; PARALLEL at a time."""

    def __init__(self) -> None:
        self.last_error: Exception | None = None  # that was retried
        self._requests = asyncio.Semaphore(PARALLEL)

    async def __call__(self, request: Callable[[], Awaitable[T]], size: int = 0) -> T:
        """Return the result of a request that moves `size` bytes."""
        backoff = INITIAL_BACKOFF_S
        while True:
            try:
                async with self._requests:
                    return await asyncio.wait_for(request(), REQUEST_TIMEOUT_S + PARALLEL * size / MIN_BANDWIDTH)
            except Exception as error:  # every filesystem raises types of its own
                if not is_transient(error):
                    raise
                # One line per operation, since all parts of a large file fail together.
                log.log(logging.DEBUG if self.last_error else logging.INFO, "retrying: %s", redact(describe(error)))
                self.last_error = error
            await asyncio.sleep(backoff * _jitter.uniform(0.5, 1))
            backoff = min(2 * backoff, MAX_BACKOFF_S)


async def gather(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all jobs; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RemoteStorage(Storage):
    """A directory of an fsspec filesystem that is not this machine's disk."""

    local = False

    def __init__(self, url: str, root: str, fs: Any) -> None:
        super().__init__(url, root)
        self.fs = fs
        self.loop = fs.loop if fs.async_impl else fsspec.asyn.get_loop()
        self._until = math.inf  # time.monotonic() of the deadline of all operations

    def set_deadline(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def read(self, name: str, limit: int | None = None, expected_size: int | None = None) -> bytes:
        path = self._path(name)
        size = self._info(path)["size"] if expected_size is None else expected_size
        if size is None:  # a web server that sends no Content-Length
            return bytes(self._request("read", "cat_file", path, end=limit))
        size = size if limit is None else min(size, limit)

        ranges = [(start, min(start + PART, size)) for start in range(0, size, PART)]
        parts = self._run("read", path, lambda retry: gather(self._range(retry, path, *part) for part in ranges), size)
        return b"".join(parts)

    def chunks(self, name: str, step: int = 1 << 23, expected_size: int | None = None) -> Iterator[bytes]:
        path = self._path(name)
        size = self._info(path)["size"] if expected_size is None else expected_size
        for start in range(0, size, step):
            end = min(start + step, size)
            yield self._run("read", path, partial(self._range, path=path, start=start, end=end), end - start)

    def write(self, name: str, content: Content) -> None:
        path, data = self._path(name), memoryview(content).cast("B")
        self._run("write", path, lambda retry: self._write(retry, path, data), len(data))

    def put_if_absent(self, name: str, content: Content) -> bool:
        path, data = self._path(name), bytes(content)
        if self.size(name) is not None:
            return False

        async def operation(retry: RetryPolicy) -> bool:
            try:
                await retry(lambda: self._put_if_absent(path, data), len(data))
            except FileExistsError:
                # It may be this call's own, by a request whose answer was lost; HTTP clients retry a PUT as well.
                return await retry(lambda: self._call("cat_file", path)) == data
            return True

        return self._run("create", path, operation, len(data))

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            info = self._info(self._path(name))
            if info["type"] == "file":
                return int(info["size"])
        return None

    def list(self) -> list[str]:
        try:
            entries = self._request("list", "ls", self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = self.root.strip("/")
        return sorted(path.rsplit("/", 1)[-1] for entry in entries if (path := entry.strip("/")) != own)

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._run("delete", path, lambda retry: self._delete(retry, path))

    def _info(self, path: str) -> dict[str, Any]:
        return dict(self._request("look at", "info", path))

    def _request(self, what: str, method: str, path: str, **kwargs: Any) -> Any:
        """Run an operation that is one request and moves few bytes."""
        return self._run(what, path, lambda retry: retry(lambda: self._call(method, path, **kwargs)))

    def _run(self, what: str, path: str, operation: Callable[[RetryPolicy], Awaitable[T]], size: int = 0) -> T:
        """Run an operation that moves `size` bytes until it ends or its deadline passes."""
        self.fs.invalidate_cache()  # of listings: other processes write here as well
        retry, start = RetryPolicy(), time.monotonic()
        end = start + OPERATION_DEADLINE_S + size / MIN_BANDWIDTH

        async def bounded() -> T:
            task = asyncio.ensure_future(operation(retry))
            while not task.done() and (left := min(end, self._until) - time.monotonic()) > 0:
                await asyncio.wait([task], timeout=min(left, DEADLINE_CHECK_S))
            task.cancel()  # which does nothing to one that is done
            await asyncio.wait([task])
            if task.cancelled():
                raise TimeoutError
            return task.result()

        try:
            # This timeout is for an event loop that hangs; the cleanup after a failure takes some time as well.
            return fsspec.asyn.sync(self.loop, bounded, timeout=end - start + 2 * REQUEST_TIMEOUT_S)
        except Exception as error:
            is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            if is_missing and http_status_and_code(error)[1] != "NoSuchBucket":
                raise
            timed_out = isinstance(error, (TimeoutError, asyncio.TimeoutError))  # FSTimeoutError is one
            cause = describe((timed_out and retry.last_error) or error)
            tried = f" (tried for {time.monotonic() - start:.0f} s)" if timed_out else ""
            raise StorageError(redact(f"cannot {what} {self.fs.unstrip_protocol(path)}: {cause}") + tried) from error

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.fs.async_impl:
            return await getattr(self.fs, f"_{method}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self.fs, method), *args, **kwargs)

    async def _range(self, retry: RetryPolicy, path: str, start: int, end: int) -> bytes:
        async def request() -> bytes:
            content = await self._call("cat_file", path, start=start, end=end)
            if len(content) != end - start:
                raise EOFError(f"{len(content)} of {end - start} bytes arrived")
            return content

        return await retry(request, end - start)

    async def _write(self, retry: RetryPolicy, path: str, content: memoryview) -> None:
        await retry(lambda: self._call("pipe_file", path, bytes(content)), len(content))

    async def _put_if_absent(self, path: str, content: bytes) -> None:
        """Write the file unless it exists.

        Raises:
            FileExistsError: it exists.
        """
        method = self.fs._pipe_file if self.fs.async_impl else self.fs.pipe_file
        exclusive = {"mode": "create"} if "mode" in inspect.signature(method).parameters else {}
        await self._call("pipe_file", path, content, **exclusive)

    async def _delete(self, retry: RetryPolicy, path: str) -> None:
        async def request() -> None:
            if await self._call("exists", path):
                await self._call("rm", path, recursive=True)

        await retry(request)
