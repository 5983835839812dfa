"""The GPU script without a GPU: what it refuses, how it keeps to its time, what it survives."""

from __future__ import annotations

import re
import sys
import time

import pytest
from benchmarking import ROOT, modules
from launching import call


@pytest.fixture(scope="module")
def benchmarks():
    yield from modules("gpu", "gpu_parts", "gpu_runs", "gpu_training")


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
    monkeypatch.setattr(benchmarks.gpu, "is_installed", lambda name: False)
    line = re.search(
        "pip wheel -w WHEELS -c constraints.txt (.*)",
        (ROOT / "benchmarks" / "README.md").read_text(),
    )[1]
    assert [
        "torch",
        *(word.strip("'").partition("[")[0] for word in line.split()),
    ] == benchmarks.gpu.missing_packages()


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


def test_a_failed_test_fails_the_part(benchmarks, part, monkeypatch):
    output = (
        "tests/e2e/test_gpu.py::test_a[x-1] PASSED [ 3%]\n"
        "tests/e2e/test_gpu.py::test_b FAILED [ 6%]\n"
    )
    monkeypatch.setattr(
        benchmarks.gpu_parts, "pytest", lambda part, args: "" if args == "two_parts" else output
    )
    figures, _, rows = benchmarks.gpu_parts.run_tests(part)
    assert figures["outcomes"] == {"PASSED": 1, "FAILED": 1}
    assert part.failures == ["test test_b"]
    assert rows == [["passed", "1"], ["failed", "1"]]


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
