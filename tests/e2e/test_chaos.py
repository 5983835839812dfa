"""Check a run under random faults of processes, disk, clock, network and store, all at once."""

from __future__ import annotations

import pytest
from chaos import Chaos
from chaos_result import check_result, undisturbed

pytestmark = pytest.mark.slow

FAULTS = 16  # `benchmarks/chaos.py` can inject many more


def test_chaos(seaweed, tmp_path, monkeypatch):
    """There are two sessions. The second continues from the count of the first."""
    bucket = seaweed.make_bucket("chaos")
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    chaos = Chaos(tmp_path, seaweed, bucket, seed=1)
    try:
        first = chaos.inject_up_to(FAULTS // 2).total
        chaos = Chaos(tmp_path, seaweed, bucket, seed=1)
        report = chaos.inject_up_to(FAULTS)
        print(report, chaos.checker)
        assert FAULTS // 2 <= first < report.total >= FAULTS
        assert len(chaos.checker.lost) >= 2, "too few faults ended an attempt"
        check_result(chaos, undisturbed(tmp_path / "undisturbed", report.steps))
    finally:
        chaos.disk.unmount()
