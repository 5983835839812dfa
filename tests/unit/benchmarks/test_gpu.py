"""The GPU script without a GPU: what it refuses, how it keeps to its time, what it survives."""

from __future__ import annotations

import ast
import configparser
import json
import sys
import time
from collections import Counter

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
        True, tmp_path, text, None, 3, time.monotonic() + 100, {"precision": "fp32"}
    )


def test_missing_packages_are_one_line(benchmarks, monkeypatch, capsys):
    assert benchmarks.gpu.missing_packages() == []
    monkeypatch.setattr(
        benchmarks.gpu, "is_installed", lambda name: name not in ("hydra-core", "fsspec")
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--part", "1", "--wheels", "/wheels"])
    with pytest.raises(
        SystemExit,
        match=r"^missing: hydra-core fsspec; python .*--find-links /wheels hydra-core fsspec$",
    ):
        benchmarks.gpu.main()


def test_the_wheels_to_bring_along_are_what_is_required(benchmarks, monkeypatch):
    """All but torch, which is there."""
    monkeypatch.setattr(benchmarks.gpu, "is_installed", lambda name: False)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    downloaded = benchmarks.gpu.requirements()
    assert downloaded[: len(required) - 1] == [line for line in required if "torch" not in line]
    names = ["pytest", "pytest-timeout"]
    assert [line.partition(">=")[0] for line in downloaded[len(required) - 1 :]] == names
    missing = benchmarks.gpu.missing_packages()
    assert missing[:3] == ["torch", "hydra-core", "omegaconf"]
    assert missing[-2:] == names
    assert len(missing) == len(required) + 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nanogpt", "."], "--nanogpt . is not a checkout of nanoGPT"),
        ([], "torch sees no GPU here; use device=cpu; --dry-run needs no GPU"),
    ],
)
def test_invalid_arguments_are_one_line(args, message, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--part",
        "3",
        "--out",
        str(tmp_path / "out"),
    ]
    done = call([*command, *args], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert message in done.stdout.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_repetitions_end_with_the_time(part):
    """The first repetition runs, the second would take too long; what is left out is noted."""
    part.ends_at = time.monotonic() + 8  # of which 5 s are for the report
    measured = part.alternate(
        "speed", {"slow": lambda: time.sleep(1.6) or 1.0, "quick": lambda: 2.0}
    )
    assert measured == {"slow": [1.0], "quick": [2.0, 2.0, 2.0]} or measured == {
        "slow": [1.0],
        "quick": [2.0],
    }
    assert "speed, slow, repetition 2: no time left" in part.notes
    assert part.failures == []


def test_a_share_of_the_time(part):
    with part.within(0.25):
        assert 20 < part.left_s() < 25
    assert 90 < part.left_s() < 95


def test_a_failure_keeps_the_other_figures(part):
    def fail() -> float:
        raise RuntimeError("out of memory")

    assert part.alternate("speed", {"large": fail, "small": lambda: 2.0}) == {
        "small": [2.0, 2.0, 2.0]
    }
    assert part.failures == ["speed, large, repetition 1: out of memory"]


def test_only_complete_pairs_are_compared(benchmarks):
    assert benchmarks.gpu_runs.ratios([2.0, 3.0, 4.0], [1.0, 2.0])["all"] == [2.0, 1.5]
    assert benchmarks.gpu_runs.ratios(None, [1.0]) is None


@pytest.mark.parametrize(("digests", "failed"), [(["a", "a"], False), (["a", "b"], True)])
def test_different_bytes_after_a_kill_fail_the_part(benchmarks, part, monkeypatch, digests, failed):
    results = iter(digests)
    monkeypatch.setattr(benchmarks.gpu_parts, "in_parts", lambda *arguments: next(results))
    monkeypatch.setattr(benchmarks.gpu_training, "tokens_per_s", lambda *arguments: 10.0)
    figures, _, rows = benchmarks.gpu_parts.exactness(part)
    assert figures["identical"] == {"modern": not failed}
    assert (part.failures == ["modern: the bytes after kill -9 differ"]) is failed
    assert figures["over_eager"]["eager, deterministic"]["median"] == 1.0
    assert rows[0][1] == ("NO" if failed else "yes")


def test_a_failed_test_fails_the_part_and_is_repeated(benchmarks, part, monkeypatch):
    output = (
        "tests/e2e/test_gpu.py::test_a[x-1] PASSED [ 3%]\n"
        "tests/e2e/test_gpu.py::test_b FAILED [ 6%]\n"
    )
    calls = []

    def pytest_once(part, words, done):
        calls.append((words, done))
        return output if len(calls) == 1 else ""

    monkeypatch.setattr(benchmarks.gpu_parts, "pytest", pytest_once)
    figures, _, rows = benchmarks.gpu_parts.run_tests(part)
    assert figures["outcomes"] == {"PASSED": 1, "FAILED": 1}
    assert part.failures == ["test test_b"]
    assert rows == [["passed", "1"], ["failed", "1"]]
    assert [done for _, done in calls] == [[], ["test_a[x-1]"], ["test_a[x-1]"]]


def test_every_test_is_in_one_phase(benchmarks):
    """`two_parts and bf16` is as in `-k`: words are parts of names."""
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


def test_a_measurement_is_kept(benchmarks, part, tmp_path):
    """For the next call, of the same device; what failed is measured again."""
    path = tmp_path / "kept.json"
    about = {"device": "a"}

    def next_call(about):
        part.kept = benchmarks.gpu_kept.Kept(path, about)

    def fail() -> float:
        raise RuntimeError("out of memory")

    next_call(about)
    part.repetitions = 1
    assert part.alternate("speed", {"a": lambda: 1.0, "b": fail}) == {"a": [1.0]}
    next_call(about)
    part.repetitions = 2
    again = part.alternate("speed", {"a": lambda: 2.0, "b": lambda: 3.0})
    assert again == {"a": [1.0, 2.0], "b": [3.0, 3.0]}
    next_call({"device": "b"})
    assert part.alternate("speed", {"a": lambda: 4.0}) == {"a": [4.0, 4.0]}
    path.write_text("{")
    next_call({"device": "b"})
    assert part.measure("speed, a, repetition 1", lambda: 5.0) == 5.0


def test_a_run_to_the_lowest_loss_goes_on(benchmarks, part, monkeypatch):
    Descent = benchmarks.gpu_runs.Descent
    calls = iter(
        [Descent([(1.0, 50, 2.0)], 0.5), Descent([(2.0, 100, 1.5), (3.0, 150, 1.6)], 0.4, True)]
    )
    monkeypatch.setattr(benchmarks.gpu_training, "our_training", lambda *arguments: next(calls))
    first = benchmarks.gpu_training.trained_so_far(part, 101)
    assert not first.has_ended
    whole = benchmarks.gpu_training.trained_so_far(part, 101)
    assert whole == Descent([(1.0, 50, 2.0), (3.0, 100, 1.5), (4.0, 150, 1.6)], 0.5, True)
    assert json.loads(json.dumps(part.kept.value("seed 101")))["has_ended"]
    assert benchmarks.gpu_training.trained_so_far(part, 101).best == 1.5  # a third call trains not


def test_a_run_without_time_has_not_missed_the_loss(benchmarks):
    Descent = benchmarks.gpu_runs.Descent
    with pytest.raises(RuntimeError, match="stopped at a loss of 2"):
        benchmarks.gpu_training.reached(Descent([(1.0, 50, 2.0)], 0.5), 1.47)
    assert benchmarks.gpu_training.reached(Descent([(1.0, 50, 2.0)], 0.5, True), 1.47)


def test_a_wait_is_counted_where_the_package_waits(benchmarks):
    """In the innermost function of the package, not in torch, nor in a comprehension."""
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


def test_only_permitted_waits_pass(benchmarks, part, monkeypatch):
    places = [
        ["logging", "metrics/meters.py", 80, "state", 4],
        ["step", "training/train_step.py", 90, "run", 1],
    ]
    monkeypatch.setattr(benchmarks.gpu_first, "in_fresh_process", lambda *a, **b: places)
    rows = []
    benchmarks.gpu_first.waits(part, {}, rows)
    assert part.failures == ["step: 1 waits at training/train_step.py:90, run"]
    assert [row[1] for row in rows] == ["4", "1", "5"]


def test_places_that_may_wait_exist(benchmarks):
    for _, file, function in benchmarks.gpu_waits.PERMITTED:
        tree = ast.parse((benchmarks.gpu_waits.PACKAGE / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in defined, file


@pytest.mark.parametrize(
    ("output", "peak"),
    [
        ('doubt\n{"strategies": {"single": {"peak_bytes": 12}}}', 12),
        ('{"memory": {"total": 3}}', None),
        (None, None),
    ],
)
def test_the_memory_that_a_plan_expects(benchmarks, part, monkeypatch, output, peak):
    def finished(command, part):
        assert {"device=h200", "format=json"} <= {*command}
        if output is None:
            raise RuntimeError("config error: device is not a key")
        return output

    part.facts = {"device": "NVIDIA H200"}
    monkeypatch.setattr(benchmarks.gpu_first, "finished", finished)
    assert benchmarks.gpu_first.planned_bytes(part, []) == peak
    assert len(part.notes) == (peak is None)


def test_utilization(benchmarks, part, monkeypatch):
    part.facts = {"matmul_flops": 100.0, "peak_flops": 400.0}
    count = {"tiny, gpt": 5.0, "tiny, modern": 6.0}
    monkeypatch.setattr(benchmarks.gpu_training, "in_fresh_process", lambda *arguments: count)
    monkeypatch.setattr(benchmarks.gpu_training, "tokens_per_s", lambda *arguments: 10.0)
    figures, _, rows = benchmarks.gpu_training.training_speed(part)
    assert figures["utilization"]["tiny, gpt"] == {"measured": 0.5, "vendor": 0.125}
    assert rows[1] == ["tiny, modern", "10 (10 .. 10)", "-", "60.0%", "15.0%"]
    assert part.notes == ["nanoGPT: no --nanogpt DIR"]


def test_the_time_to_a_loss(benchmarks):
    descent = benchmarks.gpu_runs.Descent(
        [(5.0, 0, 4.2), (9.0, 50, 1.6), (12.0, 100, 1.46), (15.0, 150, 1.5)], 6.0
    )
    assert (descent.best, descent.seconds_to(1.47), descent.seconds_to(1.4)) == (1.46, 12.0, None)
