"""Logging: the console, a log file per global rank, and progress bars."""

import contextlib
import io
import logging
import os
import sys
import threading
import weakref
from pathlib import Path

from tqdm import tqdm

from mingpt_ddp.distributed.display import Display
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import RunError, printable, reason

ROOT = "mingpt_ddp"
tqdm.set_lock(threading.RLock())  # tqdm's default is a system semaphore, which os._exit would leak
_bars: weakref.WeakSet[tqdm] = weakref.WeakSet()


class Console(logging.Handler):
    """Write to standard error: everything on rank zero, errors on other ranks."""

    def __init__(self, env: DistEnv) -> None:
        super().__init__(logging.INFO if env.is_rank_zero else logging.ERROR)
        self.display: Display | None = None
        prefix = "" if env.is_rank_zero else f"[rank {env.rank}] "
        self.setFormatter(logging.Formatter(f"{prefix}%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or getattr(record, "file_only", False):
            return
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe exited: continue
            text = self.format(record)
            if self.display is not None or sys.stderr.isatty():
                text = printable(text)
            if self.display is not None:
                self.display.write(text)
                return
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def show(self, display: Display | None) -> None:
        """Keep log lines above a display from now on; erase the one before."""
        if self.display is not None:
            self.display.close()
        self.display = display

    def close(self) -> None:
        self.show(None)
        super().close()


def escape_what_streams_cannot_encode() -> None:
    """Never crash on a character that a terminal lacks, nor on a byte that is not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not None, nor that of a notebook
            stream.reconfigure(errors="backslashreplace")


def to_console(env: DistEnv) -> None:
    """Log to the console alone."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    close()
    logger.addHandler(Console(env))


def to_file(directory: Path, env: DistEnv) -> None:
    """Log to `main.rank<N>.log` as well.

    Raises:
        RunError: it cannot be written.
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
    """Return whether there is a log file."""
    handlers = logging.getLogger(ROOT).handlers
    return any(isinstance(handler, logging.FileHandler) for handler in handlers)


def close() -> None:
    """Erase the progress lines; flush, close and remove all handlers."""
    for bar in list(_bars):
        bar.close()
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def _consoles() -> list[Console]:
    return [handler for handler in logging.getLogger(ROOT).handlers if isinstance(handler, Console)]


def show(display: Display | None) -> None:
    """Write log lines above a display, which is erased when logging ends; None erases it now."""
    for console in _consoles():
        console.show(display)


def progress_bar(env: DistEnv, total: int | None, name: str, unit: str, initial: int = 0) -> tqdm:
    """Return a progress line for rank zero's terminal. Elsewhere it is disabled.

    Log lines appear above it. It is erased when it is closed, or logging is.

    Args:
        total: Number of units at the end. None if that is not known yet.
        initial: Number of units that were done before.
    """
    has_display = any(console.display is not None for console in _consoles())
    bar = tqdm(
        total=total,
        initial=initial,
        desc=name,
        unit=unit,
        unit_scale=total is not None and total > 10**6,
        dynamic_ncols=True,
        file=sys.stderr,
        disable=has_display or not env.is_rank_zero or not _is_wide_terminal(),
        leave=False,
    )
    _bars.add(bar)
    return bar


def _is_wide_terminal() -> bool:
    """Return whether standard error is a terminal; one without columns would draw nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0
