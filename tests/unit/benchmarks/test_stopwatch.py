"""The stopwatch times a span of a trainer's steps from outside.

It counts the CPU time and memory of the trainer's workers too, and kills all of them at the end.
"""

import sys

import pytest
from benchmarking import modules
from launching import is_running, wait_for

BUSY = "[sum(range(200_000)) for _ in range(3)]"


@pytest.fixture(scope="module")
def stopwatch():
    for loaded in modules("stopwatch"):
        yield loaded.stopwatch


def trainer(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, subprocess, sys, time\n{code}"]


def test_the_span_starts_after_the_warm_up_and_ends_the_trainer(stopwatch, tmp_path):
    """Only a span that begins after the second step does not contain its sleep."""
    code = "for step in range(0, 10**9, 5):\n time.sleep(3 if step == 5 else 0.001)\n"
    pace = stopwatch.pace(trainer(f"{code} print('step', step)"), tmp_path, r"^step (\d+)", (7, 20))
    assert 0 < pace.wall_s * 20 < 3


def test_workers_are_counted_and_killed(stopwatch, tmp_path):
    worker = f"held = bytearray(b'x') * 50_000_000\nopen('held', 'w').close()\nwhile True:\n {BUSY}"
    code = f"child = subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True)\n"
    code += "open('pid', 'w').write(str(child.pid))\n"
    code += "while not os.path.exists('held'):\n time.sleep(0.1)\n"
    code += "for step in range(10**9):\n time.sleep(0.1)\n print('step', step)"
    pace = stopwatch.pace(trainer(code), tmp_path, r"^step (\d+)", (5, 5))
    assert pace.peak_mb > 55
    assert pace.cpu_s > 0
    worker_id = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(worker_id), what="the worker's end")


@pytest.mark.parametrize(
    ("code", "limit_s", "message"),
    [
        ("sys.exit('out of cheese')", None, r"before its step 30(.|\n)*out of cheese"),
        ("time.sleep(999)", 2, "before its step 30"),
    ],
    ids=["ends early", "hangs"],
)
def test_a_trainer_that_does_not_reach_the_span(stopwatch, tmp_path, code, limit_s, message):
    command = trainer(f"print('step 3', flush=True)\n{code}")
    with pytest.raises(RuntimeError, match=message):
        stopwatch.pace(command, tmp_path, r"^step (\d+)", (10, 20), limit_s=limit_s)
