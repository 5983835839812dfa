"""Random faults of processes, network and store, all at once, for a while."""

from __future__ import annotations

import json

import pytest
from chaos import Chaos, logged_steps, undisturbed, where_they_differ

from mingpt_ddp.storage.urls import open_storage

pytestmark = pytest.mark.slow

SECONDS = 40.0  # of faults; `benchmarks/chaos.py` runs longer


@pytest.fixture(scope="module")
def bucket(seaweed):
    return seaweed.make_bucket("chaos")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ranks", [(2,), (1, 2, 3)], ids=["two ranks", "another world size at every start"]
)
def test_chaos(ranks, seaweed, bucket, tmp_path, monkeypatch):
    chaos = Chaos(tmp_path, seaweed, bucket, seed=1, ranks=ranks)
    report = chaos.go(SECONDS)
    print(report)
    assert sum(map(len, report.lost.values())) >= 2, "too few faults ended an attempt"
    for rank in range(min(ranks)):
        assert logged_steps(chaos.run, rank) == list(range(1, report.steps + 1))
    (tmp_path / "undisturbed").mkdir()
    reference = undisturbed(tmp_path / "undisturbed", report.steps, max(ranks))
    if len(ranks) == 1:
        for name, value in seaweed.environment().items():
            monkeypatch.setenv(name, value)
        model = f"step_{report.steps:08d}/model.safetensors"
        assert open_storage(chaos.url).read(model) == (reference / "snapshots" / model).read_bytes()
    losses = [
        json.loads((run / "result.json").read_text())["val_loss"] for run in (chaos.run, reference)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4), where_they_differ(
        chaos.run, reference, 1e-5
    )
