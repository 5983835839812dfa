"""The progress bar of an evaluation on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.logs import progress_bar


@pytest.mark.parametrize(("columns", "shown"), [(100, True), (0, False)])
def test_a_bar_is_drawn_on_a_terminal_with_a_width(columns, shown, monkeypatch):
    """A terminal of a container may have none."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        bar = progress_bar(DistEnv(), 10, "evaluating", "batch")
        assert bar.disable == (not shown)
        bar.update(5)
        bar.refresh()
        bar.close()
        os.write(terminal, b"end")
        drawn = b""
        while not drawn.endswith(b"end"):  # a terminal may hand over a part
            drawn += os.read(main, 10_000)
        assert (b"evaluating:  50%" in drawn) == shown


def test_no_bar_without_a_terminal():
    assert progress_bar(DistEnv(), 10, "evaluating", "batch").disable
