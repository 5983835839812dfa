"""The script for GPU measurements, without a GPU.

It refuses bad arguments in one line, keeps to its time limit, and keeps the figures that it has
when a measurement fails.
"""

from __future__ import annotations

import ast
import configparser
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
from benchmarking import ROOT, modules
from launching import call

MODULES = ("gpu", "gpu_first", "gpu_kept", "gpu_parts", "gpu_runs", "gpu_training", "gpu_waits")


@pytest.fixture(scope="module")
def benchmarks():
    yield from modules(*MODULES)


@pytest.fixture
def part(benchmarks, tmp_path):
    text = tmp_path / "random.txt"
    text.write_text("ab" * 100)
    return benchmarks.gpu_runs.Part(
        True, tmp_path, text, None, 3, time.monotonic() + 1000, {"precision": "fp32"}
    )


def test_the_wheels_to_bring_along_are_the_requirements(benchmarks):
    """torch is left out, since the machine has it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    *downloaded, pytest_line, timeout_line = benchmarks.gpu.requirements()
    assert downloaded == [line for line in required if "torch" not in line]
    assert [pytest_line[:8], timeout_line[:16]] == ["pytest>=", "pytest-timeout>="]
    assert benchmarks.gpu.missing_packages() == []


def test_an_invalid_argument_is_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--part=3", "--out=out"]
    done = call([*command, "--nanogpt", "."], tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("--nanogpt . is not a checkout of nanoGPT")
    assert not (tmp_path / "out").exists()


def fail() -> float:
    raise RuntimeError("out of memory")


def test_a_failure_or_the_end_of_the_time_keeps_the_other_figures(part):
    found = part.alternate("speed", {"large": fail, "small": lambda: 2.0})
    assert found == {"small": [2.0, 2.0, 2.0]}
    assert part.failures == ["speed, large, repetition 1: out of memory"]
    assert part.measure("slow", fail, needed_s=1e6) is None
    assert part.notes == ["slow: no time left"] and len(part.failures) == 1


def test_a_measurement_is_kept(benchmarks, part, tmp_path):
    """The next call on the same device reuses it. A failed measurement is repeated."""
    path = tmp_path / "kept.json"

    def next_call(device):
        part.kept = benchmarks.gpu_kept.Kept(path, {"device": device})

    next_call("a")
    part.repetitions = 1
    assert part.alternate("speed", {"a": lambda: 1.0, "b": fail}) == {"a": [1.0]}
    next_call("a")
    part.repetitions = 2
    again = part.alternate("speed", {"a": lambda: 2.0, "b": lambda: 3.0})
    assert again == {"a": [1.0, 2.0], "b": [3.0, 3.0]}
    next_call("b")
    assert part.alternate("speed", {"a": lambda: 4.0}) == {"a": [4.0, 4.0]}
    path.write_text("{")
    next_call("b")
    assert part.measure("speed, a, repetition 1", lambda: 5.0) == 5.0


def test_only_complete_pairs_are_compared(benchmarks):
    assert benchmarks.gpu_runs.ratios([2.0, 3.0, 4.0], [1.0, 2.0])["all"] == [2.0, 1.5]
    assert benchmarks.gpu_runs.ratios(None, [1.0]) is None


def test_the_time_to_a_loss(benchmarks):
    """A run that was stopped early has not failed to reach the loss."""
    losses = [(5.0, 0, 4.2), (9.0, 50, 1.6), (12.0, 100, 1.46), (15.0, 150, 1.5)]
    descent = benchmarks.gpu_runs.Descent(losses, 6.0)
    assert (descent.best, descent.seconds_to(1.47), descent.seconds_to(1.4)) == (1.46, 12.0, None)
    with pytest.raises(RuntimeError, match="stopped at a loss of 1"):
        benchmarks.gpu_training.reached(descent, 1.4)
    assert benchmarks.gpu_training.reached(replace(descent, has_ended=True), 1.4)


def test_only_permitted_waits_pass(benchmarks, part, monkeypatch):
    places = [["logging", "metrics/meters.py", 80, "state", 4]]
    places.append(["step", "training/train_step.py", 90, "run", 1])
    monkeypatch.setattr(benchmarks.gpu_first, "in_fresh_process", lambda *a, **b: places)
    rows = []
    benchmarks.gpu_first.waits(part, {}, rows)
    assert part.failures == ["step: 1 waits at training/train_step.py:90, run"]
    assert [row[1] for row in rows] == ["4", "1", "5"]


def test_every_test_is_in_one_phase(benchmarks):
    """A phase such as `two_parts and bf16` is an expression for pytest's `-k`.

    A word matches any test whose name contains it.
    """
    names = [
        "test_a_run_in_two_parts_equals_the_whole[bf16-true]",
        "test_sample_on_a_gpu[auto]",
        "test_a_run_in_two_parts_equals_the_whole[fp32-true]",
        "test_one_rank_per_gpu",
        "test_compiled_and_under_torchrun",
        "test_sampling_in_bf16_is_reproducible",
    ]
    words = ("two_parts", "bf16", "test_compiled", "test_sample_on")
    for name in names:
        known = {word: word in name for word in words}
        phases = benchmarks.gpu_parts.PHASES.values()
        assert sum(eval(phase, {}, known) for phase in phases) == 1, name


def test_a_wait_is_counted_where_the_package_waits(benchmarks):
    """It counts for the innermost function of the package, not for torch or a comprehension."""
    waits = benchmarks.gpu_waits
    source = (
        "import warnings\n"
        "def read():\n"
        "    return [warnings.warn('called a synchronizing CUDA operation') for _ in range(2)]\n"
        "def other():\n"
        "    warnings.warn('deprecated')\n"
    )
    names = {}
    exec(compile(source, str(waits.PACKAGE / "metrics" / "meters.py"), "exec"), names)
    found = Counter()
    with waits.counted("logging", "cpu", found):
        names["read"]()
        names["other"]()
    assert found == {("logging", "metrics/meters.py", 3, "read"): 2}


def test_places_that_may_wait_exist(benchmarks):
    for _, file, function in benchmarks.gpu_waits.PERMITTED:
        tree = ast.parse((benchmarks.gpu_waits.PACKAGE / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in defined, file
