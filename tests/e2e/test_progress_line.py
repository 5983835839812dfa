"""Check the console output of a run: a progress line on a terminal, fewer log lines elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

from launching import PATIENCE_S, TINY, environment, python_main
from runs import succeed


def read_until(main: int, wanted: bytes, timeout: float = PATIENCE_S) -> bytes:
    """Read the output of a terminal until it contains `wanted` or the other end is closed."""
    shown, deadline = b"", time.monotonic() + timeout
    while wanted not in shown and time.monotonic() < deadline:
        if select.select([main], [], [], 1.0)[0]:
            try:
                shown += os.read(main, 10_000)
            except OSError:  # all processes have closed the terminal
                break
    return shown


def test_a_signal_leaves_a_clean_terminal(tmp_path: Path):
    """The cursor is never hidden, so it stays visible even after SIGKILL."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    before = termios.tcgetattr(main)
    command = [
        *python_main(),
        *TINY,
        "trainer.max_steps=100000",
        "trainer.log_every=5",
        "run.name=shown",
    ]
    env = environment(tmp_path, TERM="xterm")
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=side, start_new_session=True)
    os.close(side)
    try:
        shown = read_until(main, b"tokens/s")
        process.send_signal(signal.SIGTERM)
        shown += read_until(main, b"\0")  # reads to the end
        assert process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(main) == before
    finally:
        process.kill()
        os.close(main)
    text = shown.decode()
    # The line shows the steps done, the time left, the loss and the speed.
    speed = r"(step/s|s/step), loss [\d.]+, [\d,]+ tokens/s"
    assert re.search(rf"training: .*\d+/100000 \[.*<.*{speed}", text)
    assert not re.search(r"step \d+/100000: loss", text), "the line of a step is in the file alone"
    assert "\x1b[?25l" not in text
    assert "preempted at step" in text
    last = text.rpartition("tokens/s")[2]
    assert "\r" in last and "training" not in last, "the progress line is erased"
    log = (tmp_path / "outputs" / "shown" / "main.rank0.log").read_text()
    assert "/100000: loss" in log


def test_a_pipe_gets_fewer_lines_than_the_log(tmp_path: Path):
    """It gets each of the first 30 steps, each tenth of the first 300, and the last step."""
    command = [*python_main(), *TINY, "trainer.max_steps=43", "run.name=piped"]
    text = succeed([*command, "trainer.eval_every=36", "trainer.sample_every=37"], tmp_path)
    pattern = r"step (\d+)/43: loss"
    shown = [int(step) for step in re.findall(pattern, text)]
    assert shown == [*range(1, 31), 40, 43]
    assert "step 36: validation loss" in text and "step 37, a sample:" in text
    log = (tmp_path / "outputs" / "piped" / "main.rank0.log").read_text()
    assert len(re.findall(pattern, log)) == 43
