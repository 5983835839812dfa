"""Check `benchmarks/gpu.py --dry-run`, so that a typo does not cost time on a rented GPU."""

from __future__ import annotations

import json
import sys

import pytest
from launching import ROOT
from runs import succeed

pytestmark = pytest.mark.slow

ROWS = {
    0: ["waits of 3 cases", "a profiled step, ms", "peak of gpt_nano, fp32, recomputed, GiB"],
    1: ["skipped"],
    2: ["modern: the same bytes after kill -9", "gpt, eager, tokens/s"],
    3: ["tiny, gpt", "tiny, modern"],
    4: ["sampling: gpt, 10 streams", "snapshot: torch.save while training waits"],
    5: ["ours"],
    6: ["101", "102"],
    7: ["flags of a step, two ranks", "all_gather of updates, one rank", "a short run"],
    8: ["two ranks over gloo: the same bytes after kill -9", "one rank over gloo, fsdp"],
}


@pytest.mark.parametrize("part", ROWS)
def test_each_part_on_a_cpu(part, tmp_path):
    script = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        f"--part={part}",
        "--dry-run",
        "--out=out",
    ]
    text = succeed(script, tmp_path, MINGPT_SHAKESPEARE="", CUDA_VISIBLE_DEVICES="")
    result = json.loads((tmp_path / "out" / f"gpu_{part}.json").read_text())
    assert result["failures"] == []
    assert result["figures"]
    assert result["readme"] == []
    table = [
        line.split(" | ")[0].removeprefix("| ")
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert set(ROWS[part]) <= set(table), text
    kept = json.loads((tmp_path / "out" / f"gpu_{part}.kept.json").read_text())
    assert kept["measurements"]
    if part == 8:
        assert result["figures"]["gloo_identical"] is True
    if part == 2:
        assert result["figures"]["identical"] == {"modern": True}


def test_a_later_call_continues(tmp_path):
    """A later call keeps earlier measurements, whichever parts it names. --fresh repeats them."""
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run", "--out=out"]

    def run(*words: str) -> str:
        text = succeed([*script, *words], tmp_path, MINGPT_SHAKESPEARE="")
        return text

    assert "tokens/s, tiny, gpt, repetition 1: " in run("--part", "3")
    again = run("--part", "1", "3")
    assert "gpu_3.kept.json: keeping 3 measurements of earlier calls" in again
    assert "repetition 1" not in again
    assert "| tiny, gpt | " in again
    assert "tokens/s, tiny, gpt, repetition 1: " in run("--part", "3", "--fresh")
