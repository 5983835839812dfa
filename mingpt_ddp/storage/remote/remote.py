"""Read and write files on any remote fsspec filesystem, with timeouts, retries and deadlines.

An operation consists of one request, or of several if it must be retried. Each request has a
timeout, and the whole operation has a deadline. Both grow with the number of bytes to transfer.

Until its deadline, an operation retries transient errors (5xx, throttling, resets, timeouts) with
random exponential backoff. Permanent errors, such as a missing file or bucket, bad credentials or
missing permissions, are raised immediately.
"""

import asyncio
import inspect
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import fsspec.asyn

from mingpt_ddp.storage.remote.remote_errors import (
    NOT_IMPLEMENTED_STATUS,
    StorageError,
    describe,
    equivalent_errno,
    http_status_and_code,
    is_transient,
    redact,
)
from mingpt_ddp.storage.storage import Content, Storage

log = logging.getLogger(__name__)

# Time limit for one request, in addition to the time for its bytes at MIN_BANDWIDTH.
REQUEST_TIMEOUT_S = 30.0
# Time limit for one operation with all its retries, in addition to the time for its bytes at
# MIN_BANDWIDTH.
OPERATION_DEADLINE_S = 60.0
MIN_BANDWIDTH = 1 << 20  # assumed bytes per second, for all requests together
# The pause before the first retry. It doubles with each retry, up to the maximum.
INITIAL_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
# Larger files are transferred in parts of this size, so that a fault costs only one part.
PART_BYTES = 1 << 24
CONCURRENT_PARTS = 4  # number of parts that are in memory at the same time

PRECONDITION_FAILED_STATUS = 412
_jitter = random.SystemRandom()  # does not change the seeded generators of a run


def request_timeout(size: int) -> float:
    """Return the timeout in seconds of a request that transfers `size` bytes."""
    return REQUEST_TIMEOUT_S + CONCURRENT_PARTS * size / MIN_BANDWIDTH


def _joined(parts: list[Any], size: int) -> bytes:
    """Join the parts of a file. If fsspec returned exceptions among them, raise the first one.

    Args:
        size: Expected number of bytes of all parts together.
    """
    for part in parts:
        if isinstance(part, Exception):
            raise part
    length = sum(len(part) for part in parts)
    message = f"{length} of {size} bytes arrived; use a server that supports range requests"
    if length < size:
        raise EOFError(message)
    # A web server without range requests sends the whole file. A retry would not help.
    if length > size:
        raise ValueError(message)
    return b"".join(parts)


class RemoteStorage(Storage):
    """A directory on an fsspec filesystem other than the local disk."""

    has_flock = False

    def __init__(self, url: str, root: str, fs: Any) -> None:
        from aiohttp import ClientError  # slow to import; not needed on a local disk

        super().__init__(url, root)
        self.fs = fs
        self.loop = fs.loop if fs.async_impl else fsspec.asyn.get_loop()
        self.transient: tuple[type[Exception], ...] = (
            OSError,
            EOFError,
            asyncio.TimeoutError,
            ClientError,
        )

    def read(self, name: str, limit: int | None = None) -> bytes:
        path = self._path(name)
        size = self._info(path)["size"]
        if size is None:  # a web server did not send a Content-Length
            return bytes(self._request("read", path, "cat_file", path, end=limit))
        return b"".join(self.chunks(name, size if limit is None else min(size, limit)))

    def chunks(self, name: str, size: int, start: int = 0) -> Iterator[bytes]:
        path = self._path(name)
        step = CONCURRENT_PARTS * PART_BYTES
        for begin in range(start, start + size, step):
            end = min(begin + step, start + size)
            starts = list(range(begin, end, PART_BYTES))
            ranges = ([path] * len(starts), starts, [*starts[1:], end])
            yield self._request("read", path, "cat_ranges", *ranges, size=end - begin)

    def write(self, name: str, content: Content) -> None:
        path = self._path(name)
        data = bytes(content)
        self._request("write", path, "pipe_file", path, data, size=len(data))

    def put_if_absent(self, name: str, content: Content) -> bool:
        """Write a file atomically unless it exists. Return True if this call wrote it.

        If several processes call this at the same time, only one of them succeeds. With a store
        that does not support conditional writes, there is a short time in which several may
        succeed.

        Each caller must pass distinct content, for example with a random id. If the response to a
        successful request is lost, the retry then recognizes its own content.
        """
        path = self._path(name)
        data = bytes(content)
        if self.size(name) is not None:
            return False
        method = self.fs._pipe_file if self.fs.async_impl else self.fs.pipe_file
        exclusive: dict[str, Any] = {}
        if "mode" in inspect.signature(method).parameters:
            exclusive["mode"] = "create"
        try:
            self._request("create", path, "pipe_file", path, data, size=len(data), **exclusive)
        except OSError as error:
            status, _ = http_status_and_code(error)
            if status == NOT_IMPLEMENTED_STATUS:  # the store does not support conditional writes
                self.write(name, content)
                return True
            if isinstance(error, FileExistsError) or status == PRECONDITION_FAILED_STATUS:
                # If the response to an earlier PUT was lost, the file may be our own.
                return self.read(name) == data
            raise
        return True

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            info = self._info(self._path(name))
            if info["type"] == "file":
                return int(info["size"])
        return None

    def list(self) -> list[str]:
        try:
            entries = self._request("list", self.root, "ls", self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        directory = self.root.strip("/")
        paths = [entry.strip("/") for entry in entries]
        return sorted(path.rsplit("/", 1)[-1] for path in paths if path != directory)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            self._request("delete", path, "rm", path, recursive=True)

    def _info(self, path: str) -> dict[str, Any]:
        return dict(self._request("stat", path, "info", path))

    def _request(
        self,
        what: str,
        path: str,
        method: str,
        *args: Any,
        size: int = 0,
        seconds: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a filesystem method. Retry transient errors until the deadline.

        Args:
            what: Name of the operation in error messages: a verb.
            path: Path of the file in error messages.
            method: Name of the filesystem's method.
            size: Number of bytes to transfer.
            seconds: Time limit to use instead of OPERATION_DEADLINE_S.

        Raises:
            FileNotFoundError, NotADirectoryError, FileExistsError: The filesystem has raised this
                error.
            StorageError: There was any other error, or the deadline has passed.
        """
        # Cached listings may be outdated, because other processes write to this storage too.
        self.fs.invalidate_cache()
        start = time.monotonic()
        seconds = (seconds or OPERATION_DEADLINE_S) + size / MIN_BANDWIDTH
        errors = deque[Exception](maxlen=1)

        async def call() -> Any:
            job = self._call(method, *args, **kwargs)
            result = await asyncio.wait_for(job, request_timeout(size))
            return _joined(result, size) if method == "cat_ranges" else result

        async def operation() -> Any:
            return await asyncio.wait_for(self._retry(call, errors), seconds)

        try:
            # This timeout takes effect only if the event loop hangs.
            return fsspec.asyn.sync(self.loop, operation, timeout=seconds + REQUEST_TIMEOUT_S)
        except Exception as error:
            _, code = http_status_and_code(error)
            known = isinstance(error, (FileNotFoundError, NotADirectoryError, FileExistsError))
            if known and code != "NoSuchBucket":
                raise
            # This includes fsspec's FSTimeoutError.
            timed_out = isinstance(error, (TimeoutError, asyncio.TimeoutError))
            cause = describe(errors[-1] if timed_out and errors else error)
            tried = f" (tried for {time.monotonic() - start:.0f} s)" if timed_out else ""
            message = redact(f"cannot {what} {self.fs.unstrip_protocol(path)}: {cause}")
            failure = StorageError(message + tried)
            failure.errno = equivalent_errno(error)
            raise failure from error

    async def _retry(self, call: Callable[[], Awaitable[Any]], errors: deque[Exception]) -> Any:
        """Repeat a call until it succeeds, or raises a permanent error. Return the result.

        Args:
            errors: The list to which transient errors are appended.
        """
        backoff = INITIAL_BACKOFF_S
        while True:
            try:
                return await call()
            except Exception as error:  # every filesystem has its own exception types
                if not is_transient(error, self.transient):
                    raise
                level = logging.DEBUG if errors else logging.INFO
                log.log(level, "retrying: %s", redact(describe(error)))
                errors.append(error)
            await asyncio.sleep(backoff * _jitter.uniform(0.5, 1))
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem: directly if it is asynchronous, else on a thread."""
        if self.fs.async_impl:
            return await getattr(self.fs, f"_{method}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self.fs, method), *args, **kwargs)
