"""What an exception of a remote filesystem means: whether to retry, which errno, which message."""

import asyncio
import errno
import re

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
PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
)


class StorageError(OSError):
    """An operation failed permanently or until its deadline.

    The message is one line without credentials.
    """


def http_status_and_code(error: BaseException) -> tuple[int | None, str | None]:
    """Return an exception's HTTP status and the store's error code; None for what it lacks."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)  # of botocore
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, response.get("Error", {}).get("Code")
        cause = cause.__cause__
    for name in ("status", "status_code", "code"):
        number = getattr(error, name, None)
        if isinstance(number, int):
            return number, None
    return None, None


def is_transient(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    """Return whether retrying the request may succeed.

    Args:
        kinds: exceptions that may pass, if they have no HTTP status.
    """
    status, code = http_status_and_code(error)
    if status is None:
        return isinstance(error, kinds) and not isinstance(error, PERMANENT)
    if status in (NOT_IMPLEMENTED_STATUS, FULL_STATUS):
        return False
    return status >= 500 or status in RETRY_STATUS or code in RETRY_CODES


def equivalent_errno(error: Exception) -> int | None:
    """Return the errno that a local disk would give if it were full or not writable."""
    status, _ = http_status_and_code(error)
    if status == FULL_STATUS:
        return errno.ENOSPC
    if status in DENIED_STATUS or isinstance(error, PermissionError):
        return errno.EACCES
    return getattr(error, "errno", None)


def redact(text: str) -> str:
    """Return at most 300 characters in one line, without passwords and signatures of URLs."""
    line = " ".join(text.split())
    line = re.sub(r"://[^/\s]*@", "://***@", line)
    line = re.sub(r"\?[\w%.-]+=[^\s\"']*", "?***", line)
    return line[:300]


def describe(error: BaseException) -> str:
    """Return the store's error code, or the exception's name, and its message."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "no response in time"
    _, code = http_status_and_code(error)
    message = getattr(error, "strerror", None) or error
    return f"{code or type(error).__name__}: {message}"
