"""A run on a terminal: the panel is drawn, and a signal leaves a clean terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

from launching import PATIENCE_S, TINY, environment, python_main


def read_until(main: int, wanted: bytes, timeout: float = PATIENCE_S) -> bytes:
    """Return what the terminal shows until it shows `wanted`, or until the other end is closed."""
    shown, deadline = b"", time.monotonic() + timeout
    while wanted not in shown and time.monotonic() < deadline:
        if select.select([main], [], [], 1.0)[0]:
            try:
                shown += os.read(main, 10_000)
            except OSError:  # all processes have closed it
                break
    return shown


def test_a_signal_leaves_a_clean_terminal(tmp_path: Path):
    """The cursor is never hidden, so that SIGKILL would leave it visible, too."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(main)
    command = [
        *python_main(),
        *TINY,
        "trainer.max_steps=100000",
        "trainer.log_every=5",
        "run.name=shown",
    ]
    env = environment(tmp_path, TERM="xterm")
    for name in ("CI", "COLUMNS", "LINES"):
        env.pop(name, None)
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=side, start_new_session=True)
    os.close(side)
    try:
        shown = read_until(main, b"goodput")
        process.send_signal(signal.SIGTERM)
        shown += read_until(main, b"\0")  # to the end
        assert process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(main) == before
    finally:
        process.kill()
        os.close(main)
    for part in (
        "outputs/shown",
        "step 1/100,000 ─",
        "loss ",
        "▁",
        "tokens/s, utilization",
        "goodput",
    ):
        assert part.encode() in shown, shown.decode()
    assert b"\x1b[?25l" not in shown
    assert b"preempted at step" in shown
    end = shown.rpartition("╰".encode())[2].decode()
    assert "\x1b[1A\x1b[2K" in end, "the last panel is erased"
    assert "loss 4." in (tmp_path / "outputs" / "shown" / "main.rank0.log").read_text()
