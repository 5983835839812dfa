"""What rank zero redraws at the bottom of its terminal, below the log lines."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from mingpt_ddp.distributed.env import DistEnv

if TYPE_CHECKING:
    from rich.console import RenderableType

MIN_COLUMNS = 60
PERIOD_S = 0.25  # between two drawings


def can_draw(env: DistEnv) -> bool:
    """Return whether this is rank zero on a wide terminal that can move its cursor."""
    if not env.is_rank_zero or sys.stderr is None or not sys.stderr.isatty():
        return False
    if os.environ.get("CI") or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns >= MIN_COLUMNS


class Display:
    """Drawn by the thread that calls `refresh`, at most every PERIOD_S.

    SIGKILL does not leave the cursor hidden.
    """

    def __init__(self, stream: TextIO, draw: Callable[[], "RenderableType"]) -> None:
        from rich.console import Console  # rich takes a tenth of a second to import
        from rich.live import Live

        class ConsoleWithCursor(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False

        self._drawn_at = 0.0
        self._console = ConsoleWithCursor(file=stream)
        self._live = Live(
            console=self._console,
            get_renderable=draw,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def refresh(self) -> None:
        """Draw again if it is time."""
        now = time.monotonic()
        if now - self._drawn_at >= PERIOD_S:
            self._drawn_at = now
            with contextlib.suppress(OSError, ValueError):  # the terminal was closed: continue
                self._live.refresh()

    def write(self, text: str) -> None:
        """Print a text above the display."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Erase the display."""
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()
