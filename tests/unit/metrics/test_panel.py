"""What the panel shows, where it is drawn, and what it leaves on the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator

import pytest
from rich.console import Console as RichConsole

from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.display import can_draw
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.metrics.sinks.panel import Panel, sparkline

METRICS = {
    **{
        "train/loss": 2.5,
        "speed/tokens_per_s": 41_234.5,
        "speed/step_ms": 500.0,
        "speed/mfu": 0.31,
    },
    **{
        "speed/goodput": 0.97,
        "speed/slowest_rank": 1.0,
        "speed/slowest_ratio": 1.84,
        "val/loss": 2.75,
    },
}


@contextlib.contextmanager
def terminal(monkeypatch, columns: int = 100) -> Iterator[int]:
    """Let standard error be a terminal; yield the other end."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    for name in ("CI", "COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(side, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        yield main
        os.close(main)


def drawn(main: int) -> str:
    os.write(sys.stderr.fileno(), b"THE-END")
    shown = b""
    while not shown.endswith(b"THE-END"):  # a terminal may hand over a part
        shown += os.read(main, 10_000)
    return shown.decode()


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert sparkline([1.0, float("nan"), 1.0]) == "▁?▁"
    assert sparkline([]) == ""


def test_the_panel_shows_the_run():
    panel = Panel(DistEnv(rank=1, world_size=2), "outputs/demo", "tokens")
    panel.step, panel.last, panel.snapshot_step = 100, 200, 90
    panel.update(METRICS)
    out = io.StringIO()
    RichConsole(file=out, width=100).print(panel.draw())
    text = out.getvalue()
    for part in (
        *(
            "outputs/demo",
            "step 100/200",
            "50%",
            "0:00:50 left",
            "loss 2.5000 ▁",
            "validation 2.7500",
            "41,23",
        ),
        *("tokens/s", "MFU 31%", "goodput 97%", "slowest rank 1 (1.8x)", "snapshot 90"),
    ):
        assert part in text


def test_nothing_is_known_before_the_first_log_step():
    panel = Panel(DistEnv(rank=1, world_size=2), "x", "tokens")
    out = io.StringIO()
    RichConsole(file=out, width=80).print(panel.draw())
    assert "step 0/?" in out.getvalue() and "loss" not in out.getvalue()


@pytest.mark.parametrize(
    ("columns", "environment", "rank", "expected"),
    [
        *[
            (100, {}, 0, True),
            (60, {}, 0, True),
            (59, {}, 0, False),
            (0, {}, 0, False),
            (100, {}, 1, False),
        ],
        *[(100, {"TERM": "dumb"}, 0, False), (100, {"CI": "true"}, 0, False)],
    ],
)
def test_where_it_is_drawn(columns, environment, rank, expected, monkeypatch):
    with terminal(monkeypatch, columns):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert can_draw(DistEnv(rank=rank, world_size=2)) == expected


def test_not_in_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not can_draw(DistEnv())


def test_log_lines_stand_above_the_panel_and_the_end_erases_it(monkeypatch):
    with terminal(monkeypatch) as main:
        logs.to_console(DistEnv())
        panel = Panel(DistEnv(), "outputs/demo", "tokens")
        assert panel.is_drawn
        panel.update(METRICS)
        panel.advance(100, 200)
        logging.getLogger("mingpt_ddp.test").info("step 100: [red]validation\x1b[2J")
        with progress_bar(DistEnv(), 10, "evaluating", "batch") as bar:
            assert bar.disable
        logs.close()
        text = drawn(main)
    first, line, rest = text.partition("step 100: [red]validation\\x1b[2J")
    assert line, "the line is as it was logged, without control characters"
    assert "step 100/200" in first and "step 100/200" in rest, (
        "the panel is drawn again below the line"
    )
    last = rest.rpartition("╯")[2]
    assert last.count("\x1b[1A\x1b[2K") >= 4, "all lines are erased at the end"
    assert "\x1b[?25l" not in text, "SIGKILL would leave the cursor hidden"


def test_it_is_drawn_four_times_a_second_at_most(monkeypatch):
    with terminal(monkeypatch) as main:
        panel = Panel(DistEnv(), "outputs/demo", "tokens")
        for step in range(1, 1001):
            panel.advance(step, 2000)
        panel.close()
        frames = re.findall(r"step [\d,]+/2,000", drawn(main))
    assert 2 <= len(frames) < 100  # a second at most, with time for a loaded machine
    assert frames[-1] == "step 1,000/2,000"
