"""Print results and errors for a person or a pipe."""

import contextlib
import io
import os
import signal
import sys
from typing import IO

from mingpt_ddp.errors import OutputError, printable, reason

# Exit code if nobody reads the rest of the output, as in `... | head -1`.
CLOSED_PIPE = 128 + signal.SIGPIPE


def escape_what_streams_cannot_encode() -> None:
    """Escape characters that a stream cannot encode, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        # A stream may also be None, or a stream of a notebook.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def echo(text: str, *, verbatim: bool = False) -> None:
    """Print a result on standard output. A process without standard output prints nothing.

    If the reader of the output has exited, exit like a program that SIGPIPE ends.

    Args:
        verbatim: Keep terminal escapes, which untrusted text may contain.

    Raises:
        OutputError: The result cannot be written.
    """
    try:
        _print(text if verbatim else printable(text), sys.stdout)
    except BrokenPipeError:
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        raise OutputError(
            f"cannot write to standard output: {reason(error)}; free space, or send the output "
            "elsewhere"
        ) from error


def echo_error(text: str) -> None:
    """Print untrusted text on standard error. Failures to write do not change the exit code."""
    with contextlib.suppress(OSError):
        _print(printable(text), sys.stderr)


def drop_unwritten_log() -> None:
    """Drop log lines that cannot be written to standard error.

    They must not change the exit code.
    """
    with contextlib.suppress(OSError):
        _print("", sys.stderr, end="")


def _print(text: str, stream: IO[str] | None, end: str = "\n") -> None:
    if stream is None:  # the process was started with this stream closed
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:
        # At exit Python would write the buffer again, fail again, and exit with code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise
