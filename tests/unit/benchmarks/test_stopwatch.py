"""The stopwatch: which steps it times, whose time and memory it counts, what it kills."""

import sys
import time

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
    code = (
        f"for step in range(0, 10**9, 5):\n {BUSY}\n"
        " time.sleep(0.5 if step < 5 else 0.01)\n"
        " print('step', step)"
    )
    begun = time.monotonic()
    pace = stopwatch.pace(trainer(code), tmp_path, r"^step (\d+)", (7, 200))
    assert 0 < pace.wall_s <= (time.monotonic() - begun - 0.5) / 200
    assert pace.cpu_s > 0
    assert 5 < pace.peak_mb < 100


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


def test_the_output_of_a_trainer_that_ends_early_is_reported(stopwatch, tmp_path):
    with pytest.raises(RuntimeError, match=r"before its step 30(.|\n)*out of cheese"):
        stopwatch.pace(
            trainer("print('step 3')\nsys.exit('out of cheese')"),
            tmp_path,
            r"^step (\d+)",
            (10, 20),
        )


def test_a_trainer_that_hangs_is_killed_at_the_limit(stopwatch, tmp_path):
    with pytest.raises(RuntimeError, match="before its step 30"):
        stopwatch.pace(
            trainer("print('step 3', flush=True)\ntime.sleep(999)"),
            tmp_path,
            r"^step (\d+)",
            (10, 20),
            limit_s=2,
        )
