"""Interpret the exceptions of remote filesystems: decide on retries, and describe the cause."""

import asyncio
import errno
import re

# Error codes of S3 after which a retry may succeed.
RETRY_CODES = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "XAmzContentSHA256Mismatch",
}
RETRY_STATUS = {408, 409, 425, 429}
NOT_IMPLEMENTED_STATUS = 501
FULL_STATUS = 507
DENIED_STATUS = (401, 403)
PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
)


class StorageError(OSError):
    """An operation on a remote filesystem has failed, permanently or until its deadline.

    The message is one line and does not contain credentials.
    """


def http_status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return the HTTP status of an exception, and the error code of the store.

    Each of them is None if the exception does not have it.
    """
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)  # an attribute of botocore's exceptions
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, response.get("Error", {}).get("Code")
        cause = cause.__cause__
    for name in ("status", "status_code", "code"):
        number = getattr(error, name, None)
        if isinstance(number, int):
            return number, None
    return None, None


def is_transient(error: Exception, transient_types: tuple[type[Exception], ...]) -> bool:
    """Return True if a retry of the request may succeed.

    Args:
        transient_types: Types of exceptions that are transient if they do not have an HTTP status.
    """
    status, code = http_status_and_code(error)
    if status is None:
        return isinstance(error, transient_types) and not isinstance(error, PERMANENT_ERRORS)
    if status in (NOT_IMPLEMENTED_STATUS, FULL_STATUS):
        return False
    return status >= 500 or status in RETRY_STATUS or code in RETRY_CODES


def equivalent_errno(error: Exception) -> int | None:
    """Return the errno with which a local disk would fail, if the storage is full or not writable.

    For any other cause, return the errno of the exception, or None if it does not have one.
    """
    status, _ = http_status_and_code(error)
    if status == FULL_STATUS:
        return errno.ENOSPC
    if status in DENIED_STATUS or isinstance(error, PermissionError):
        return errno.EACCES
    return getattr(error, "errno", None)


def redact(text: str) -> str:
    """Remove passwords and signatures from the URLs in a text, and cut it to one short line."""
    line = " ".join(text.split())
    line = re.sub(r"://[^/\s]*@", "://***@", line)
    line = re.sub(r"\?[\w%.-]+=[^\s\"']*", "?***", line)
    return line[:300]


def describe(error: BaseException) -> str:
    """Describe an exception by the error code of the store, or its own name, and its message."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "no response in time"
    _, code = http_status_and_code(error)
    message = getattr(error, "strerror", None) or error
    return f"{code or type(error).__name__}: {message}"
