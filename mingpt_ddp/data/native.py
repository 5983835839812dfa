"""Call a native library on untrusted input: in bounded CPU time, silently, and panics raised."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.05  # between two looks at the CPU time


def call_native(function: Callable[[], T], cpu_seconds: float) -> T:
    """Call a function on a thread of its own and return its result.

    The function must release the GIL. If it takes too long its threads go on until the process
    exits.

    Raises:
        ValueError: it panicked (PyO3's PanicException is no Exception), or took more than
            `cpu_seconds` of CPU time.
        Exception: what the function raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=call, name="native library", daemon=True)
    begin = time.process_time()
    with _silent_stderr():  # a panic prints its backtrace there
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if thread.is_alive() and time.process_time() - begin > cpu_seconds:
                raise ValueError(f"it takes more than {cpu_seconds:.0f} seconds of CPU time")
    for error in errors:
        if type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise error
    return results[0]


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what this process writes to file descriptor 2."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
