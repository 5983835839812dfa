"""The live panel of a run on rank zero's terminal; nothing is drawn elsewhere."""

import math
import sys
from collections import deque
from typing import TYPE_CHECKING

from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.display import Display, can_draw
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import duration, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

BLOCKS = "▁▂▃▄▅▆▇█"
LOSSES = 24  # columns of the losses
BAR = 24  # columns of the progress


def sparkline(values: list[float]) -> str:
    """Draw values as blocks from the lowest to the highest of them."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(max(finite, default=0.0) - low, 1e-9)
    line = ""
    for value in values:
        line += BLOCKS[min(7, int(8 * (value - low) / span))] if math.isfinite(value) else "?"
    return line


class Panel:
    """Loss, speed, goodput, the slowest rank, the last snapshot and the time left."""

    def __init__(self, env: DistEnv, title: str, unit: str) -> None:
        """
        Args:
            unit: of the items, as in `tokens`.
        """
        self.title = printable(title)
        self.unit = unit
        self.step = 0
        self.last: int | None = None  # step of the run, if it is known
        self.is_drawn = can_draw(env)
        self.snapshot_step: int | None = None
        self._metrics: dict[str, float] = {}
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._display: Display | None = None

    def advance(self, step: int, last: int | None) -> None:
        """Show that a step is done; the first one starts the panel.

        Args:
            last: the last step of the run, if it is known.
        """
        self.step = step
        self.last = last
        if self.is_drawn and self._display is None:
            self._display = Display(sys.stderr, self.draw)
            logs.show(self._display)
        if self._display is not None:
            self._display.refresh()

    def update(self, metrics: dict[str, float]) -> None:
        """Show metrics by tag."""
        self._metrics |= metrics
        if "train/loss" in metrics:
            self._losses.append(metrics["train/loss"])

    def draw(self) -> "RenderableType":
        """Return the panel, for rich."""
        from rich.panel import Panel as Frame
        from rich.text import Text

        lines = [self._progress(), self._loss(), self._speed()]
        text = Text("\n".join(line for line in lines if line), no_wrap=True, overflow="ellipsis")
        return Frame(text, title=Text(self.title), title_align="left")

    def _progress(self) -> str:
        if self.last is None:
            return f"step {self.step:,}/?"
        done = self.step / max(1, self.last)
        filled = round(BAR * done)
        line = f"step {self.step:,}/{self.last:,} {'━' * filled}{'─' * (BAR - filled)} {done:.0%}"
        if "speed/step_ms" in self._metrics:
            left_s = (self.last - self.step) * self._metrics["speed/step_ms"] / 1e3
            line += f", {duration(left_s)} left"
        return line

    def _loss(self) -> str:
        if not self._losses:
            return ""
        line = f"loss {self._losses[-1]:.4f} {sparkline([*self._losses])}"
        if "val/loss" in self._metrics:
            line += f" validation {self._metrics['val/loss']:.4f}"
        return line

    def _speed(self) -> str:
        metrics = self._metrics
        parts = []
        if (per_s := metrics.get(f"speed/{self.unit}_per_s")) is not None:
            parts.append(f"{per_s:,.0f} {self.unit}/s")
        if "speed/mfu" in metrics:
            parts.append(f"MFU {metrics['speed/mfu']:.0%}")
        if "speed/goodput" in metrics:
            parts.append(f"goodput {metrics['speed/goodput']:.0%}")
        if "speed/slowest_rank" in metrics:
            parts.append(
                f"slowest rank {metrics['speed/slowest_rank']:.0f} "
                f"({metrics['speed/slowest_ratio']:.1f}x)"
            )
        if self.snapshot_step:
            parts.append(f"snapshot {self.snapshot_step:,}")
        return ", ".join(parts)

    def close(self) -> None:
        """Erase the panel."""
        if self._display is not None:
            logs.show(None)
            self._display.close()
