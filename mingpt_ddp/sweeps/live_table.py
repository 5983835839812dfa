"""The table of the jobs that run now, redrawn on a terminal below the log lines."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.display import PERIOD_S, Display, can_draw
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.metrics.jsonl import METRICS
from mingpt_ddp.results.formats import cut, fixed
from mingpt_ddp.storage.storage import read_tail
from mingpt_ddp.sweeps.local_workers import LocalJob
from mingpt_ddp.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from rich.console import RenderableType

TAIL_BYTES = 1 << 14  # of metrics.jsonl, which holds its last lines
HEAD = ("job", "parameters", "step", "train loss", "val loss", "seconds")


class LiveTable:
    """A row per slot: how far its job is, by the end of its metrics.jsonl."""

    def __init__(self, sweep: Sweep, running: Mapping[Slot, LocalJob]) -> None:
        """
        Args:
            running: the jobs, which change.
        """
        self._sweep = sweep
        self._running = running

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Redraw the table in this context, on a terminal."""
        if not can_draw(self._sweep.env):
            yield
            return
        display = Display(sys.stderr, self.draw)
        logs.show(display)
        redrawing = asyncio.ensure_future(_redraw(display))
        try:
            yield
        finally:
            redrawing.cancel()
            logs.show(None)

    def draw(self) -> "RenderableType":
        """Return the table, for rich."""
        from rich.table import Table
        from rich.text import Text

        ended = len(self._sweep.done) + len(self._sweep.failed)
        title = f"{ended} of {self._sweep.planned} jobs ended"
        table = Table(*HEAD, title=title, title_justify="left", box=None)
        for slot in sorted(self._running, key=lambda slot: slot.number):
            local = self._running[slot]
            latest = _latest(local.launch.directory)
            cells = [
                str(local.job.number + 1),
                cut(local.job.label),
                fixed(latest.get("step"), ".0f"),
                fixed(latest.get("train_loss"), ".4f"),
                fixed(latest.get("val_loss"), ".4f"),
                f"{time.monotonic() - local.started_at:.0f}",
            ]
            table.add_row(*map(Text, cells))
        return table


async def _redraw(display: Display) -> None:
    while True:
        display.refresh()
        await asyncio.sleep(PERIOD_S)


def _latest(directory: Path) -> dict[str, float]:
    """Return the last recorded value of each metric."""
    values: dict[str, float] = {}
    with contextlib.suppress(OSError):
        lines = read_tail(directory / METRICS, TAIL_BYTES).split(b"\n")
        for line in lines[:-1]:  # the last one is empty, or being written
            with contextlib.suppress(ValueError, AttributeError):
                for name, value in json.loads(line).items():
                    if type(value) in (int, float):
                        values[name] = value
    return values
