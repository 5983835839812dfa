"""A console and a log file per global rank, and rank 0's progress bar."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import RunError, printable

ROOT = "mingpt_ddp"
tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which nobody would remove


class Console(logging.Handler):
    """Lines on standard error, above the progress bar where there is one."""

    def __init__(self, env: DistEnv) -> None:
        super().__init__(logging.INFO if env.is_rank_zero else logging.ERROR)
        prefix = "" if env.is_rank_zero else f"[rank {env.rank}] "
        self.setFormatter(logging.Formatter(f"{prefix}%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or getattr(record, "file_only", False):
            return
        with contextlib.suppress(OSError, ValueError):  # whoever read along is gone: that is no reason to stop
            text = self.format(record)
            tqdm.write(printable(text) if sys.stderr.isatty() else text, file=sys.stderr)
            sys.stderr.flush()


def to_console(env: DistEnv) -> None:
    """Rank 0 shows what happens, the others only their errors."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    close()
    logger.addHandler(Console(env))


def to_file(directory: Path, env: DistEnv) -> None:
    """From now on everything goes to `main.rank<N>.log` as well.

    Raises:
        RunError: it cannot be written.
    """
    path = directory / f"main.rank{env.rank}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no regular file")
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger(ROOT).addHandler(handler)


def close() -> None:
    """Flush and forget all handlers, so that the next job of a sweep starts with none."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class Progress:
    """A bar over the steps on rank 0's terminal; elsewhere nothing, there the log lines tell."""

    def __init__(self, env: DistEnv, done: int, total: int) -> None:
        self.shown = env.is_rank_zero and sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            file=sys.stderr,
            disable=not self.shown,
            leave=False,
        )

    def advance(self) -> None:
        self._bar.update()

    def describe(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        self._bar.close()
