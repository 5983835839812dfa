"""`benchmarks/gpu.py --dry-run`: a typo must not cost time on a rented GPU."""

from __future__ import annotations

import json
import sys

import pytest
from launching import ROOT, call

pytestmark = pytest.mark.slow

ROWS = {
    1: ["skipped"],
    2: ["modern: the same bytes after kill -9", "gpt, eager, tokens/s"],
    3: ["tiny, gpt", "tiny, modern"],
    4: ["sampling: gpt, 10 streams", "snapshot: torch.save while training waits"],
    5: ["ours"],
    6: ["101", "102"],
}


@pytest.mark.parametrize("part", ROWS)
def test_a_part_on_a_cpu(part, tmp_path):
    script = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        f"--part={part}",
        "--dry-run",
        "--out=out",
    ]
    done = call(script, tmp_path, timeout=240, MINGPT_SHAKESPEARE="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out" / f"gpu_{part}.json").read_text())
    assert result["failures"] == []
    assert result["figures"]
    assert result["readme"] == []
    table = [
        line.split(" | ")[0].removeprefix("| ")
        for line in done.stdout.splitlines()
        if line.startswith("| ")
    ]
    assert set(ROWS[part]) <= set(table), done.stdout
    if part == 2:
        assert result["figures"]["identical"] == {"modern": True}
