"""Logging: the console, a log file per global rank, and progress bars."""

import contextlib
import logging
import os
import sys
import threading
import weakref
from pathlib import Path

from tqdm import tqdm

from mingpt_ddp.errors import RunError, printable, reason
from mingpt_ddp.process.env import SHOWS_PROGRESS, DistEnv

ROOT = "mingpt_ddp"  # name of the logger to which all modules of this package log
# By default, tqdm uses a system semaphore, which os._exit would leak.
tqdm.set_lock(threading.RLock())
_bars: weakref.WeakSet[tqdm] = weakref.WeakSet()


class Console(logging.Handler):
    """Write to standard error: everything on rank zero, errors on other ranks."""

    def __init__(self, env: DistEnv) -> None:
        super().__init__(logging.INFO if env.is_rank_zero else logging.ERROR)
        prefix = "" if env.is_rank_zero else f"[rank {env.rank}] "
        self.setFormatter(logging.Formatter(f"{prefix}%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or getattr(record, "file_only", False):
            return
        # Go on without output if the reader of a pipe has exited.
        with contextlib.suppress(OSError, ValueError):
            text = self.format(record)
            if sys.stderr.isatty():
                text = printable(text)
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()


def to_console(env: DistEnv) -> None:
    """Log only to the console."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    close()
    logger.addHandler(Console(env))


def to_file(directory: Path, env: DistEnv) -> None:
    """Also log to the file `main.rank<N>.log`.

    Args:
        directory: Directory of the file.
        env: Its global rank is the N in the file name.

    Raises:
        RunError: The file cannot be written.
    """
    path = directory / f"main.rank{env.rank}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # opening a named pipe would block
            raise OSError("it is not a regular file")
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger(ROOT).addHandler(handler)


def has_file() -> bool:
    """Return True if there is a log file."""
    handlers = logging.getLogger(ROOT).handlers
    return any(isinstance(handler, logging.FileHandler) for handler in handlers)


def close() -> None:
    """Erase the progress lines. Flush, close and remove all handlers."""
    for bar in list(_bars):
        bar.close()
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def progress_bar(env: DistEnv, total: int | None, name: str, unit: str, initial: int = 0) -> tqdm:
    """Return a progress line for rank zero's terminal. Elsewhere it is disabled.

    Log lines appear above it. It is erased when it is closed, or when `close` is called.

    Args:
        total: Number of units at the end. None if that is not known yet.
        initial: Number of units that were done before.
    """
    is_notebook = SHOWS_PROGRESS in os.environ
    bar = tqdm(
        total=total,
        initial=initial,
        desc=name,
        unit=unit,
        unit_scale=total is not None and total > 10**6,
        dynamic_ncols=not is_notebook,
        ncols=100 if is_notebook else None,
        mininterval=1.0 if is_notebook else 0.1,  # seconds
        file=sys.stderr,
        disable=not env.is_rank_zero or not (is_notebook or _is_sized_terminal()),
        leave=False,
    )
    _bars.add(bar)
    return bar


def _is_sized_terminal() -> bool:
    """Return True if standard error is a terminal whose size is known. Else tqdm prints nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return min(os.get_terminal_size(sys.stderr.fileno())) > 0
