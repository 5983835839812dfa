"""The progress line on a terminal, and the log lines above it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable, Iterator

import pytest

from mingpt_ddp.process import logs
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.logs import progress_bar


@contextlib.contextmanager
def terminal(monkeypatch, columns: int, rows: int = 40) -> Iterator[Callable[[], str]]:
    """Replace standard error by a terminal. Yield a function that returns its contents."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def drawn() -> str:
        os.write(side, b"THE-END")
        shown = b""
        while not shown.endswith(b"THE-END"):  # one read may return only a part
            shown += os.read(main, 10_000)
        return shown.decode()

    with os.fdopen(side, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        yield drawn
    os.close(main)


@pytest.mark.parametrize(
    ("columns", "rows", "shown"), [(100, 40, True), (0, 40, False), (100, 0, False)]
)
def test_a_line_is_drawn_on_a_terminal_of_a_known_size(columns, rows, shown, monkeypatch):
    """A terminal in a container may have no size. Then log lines are printed instead."""
    with terminal(monkeypatch, columns, rows) as drawn:
        bar = progress_bar(DistEnv(), 10, "evaluating", "batch")
        assert bar.disable == (not shown)
        bar.update(5)
        bar.refresh()
        bar.close()
        assert ("evaluating:  50%" in drawn()) == shown


def test_log_lines_appear_above_the_progress_line_and_closing_erases_it(monkeypatch):
    with terminal(monkeypatch, 100) as drawn:
        logs.to_console(DistEnv())
        bar = progress_bar(DistEnv(), 200, "training", "step", initial=90)
        bar.update(10)
        bar.refresh()
        logging.getLogger("mingpt_ddp.test").info("step 100: [red]validation\x1b[2J")
        logs.close()
        before, line, after = drawn().partition("step 100: [red]validation\\x1b[2J")
    assert line, "the line is as it was logged, without control characters"
    assert "training:  50%" in before and "100/200" in before
    assert "100/200" in after, "it is drawn again below the line"
    assert after.rpartition("100/200")[2].endswith(" \rTHE-END"), "and erased at the end"


def test_no_bar_without_a_terminal():
    assert progress_bar(DistEnv(), 10, "evaluating", "batch").disable
