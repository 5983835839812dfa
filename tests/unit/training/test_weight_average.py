"""The average of the weights (trainer.ema): evaluation, sampling and snapshots use it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch
from launching import TINY
from multiprocess.ranks import configure
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.read.load_model import load_model
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.evaluation.evaluator import Evaluator
from mingpt_ddp.training.evaluation.weight_average import WeightAverage
from mingpt_ddp.training.run import train_run


def test_the_formula():
    """The decay is 2/11, then 3/12, then at most 0.3."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average, expected = WeightAverage(model, 0.3), 1.0
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 0.3)):
        nn.init.constant_(model.weight, step + 1.0)
        average.update(step)
        expected = decay * expected + (1 - decay) * (step + 1.0)
    with average.applied():
        assert float(model.weight.detach()) == pytest.approx(expected)
    assert float(model.weight.detach()) == 4.0
    assert float(average.state()["ema"]["weight"]) == pytest.approx(expected)


def test_shared_weights_and_buffers():
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)
    )
    model[1].weight = model[0].weight
    average, before = WeightAverage(model, 0.5), model[0].weight.detach().clone()
    nn.init.constant_(model[0].weight, 3.0)
    model(torch.randn(4, 2))
    with average.applied():
        assert torch.equal(model[1].weight, before)
    assert torch.equal(model[1].weight, torch.full((2, 2), 3.0))
    state = average.state()["ema"]
    assert torch.equal(state["0.weight"], before)
    assert torch.equal(state["1.weight"], before)
    assert torch.equal(state["2.running_mean"], model[2].running_mean)
    assert int(state["2.num_batches_tracked"]) == 1


def train(root: Path, *overrides: str) -> None:
    settings = [
        *TINY,
        "trainer.device=cpu",
        "optimizer.schedule_steps=12",
        f"run.root={root}",
        "run.name=run",
    ]
    config = from_mapping(configure(*settings, *overrides))
    runtime = Runtime(config, DistEnv())
    train_run(Job(config), runtime)
    runtime.close()


def test_a_run_evaluates_saves_and_resumes_it(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    train(tmp_path, "trainer.max_steps=4")
    train(tmp_path, "trainer.max_steps=8", "trainer.ema=0.9")
    assert "has no average of the weights: trainer.ema starts from its weights" in caplog.text
    train(tmp_path, "trainer.ema=0.9")
    assert caplog.text.count("has no average") == 1
    store = SnapshotStore(str(tmp_path / "run" / "snapshots"))
    tensors = safetensors.torch.load_file(Path(store.url) / "step_00000012" / "ema.safetensors")
    whole = store.read(12)
    assert whole.ema == {}, "a run without it does not read it"
    assert any(not torch.equal(tensors[name], weight) for name, weight in whole.model.items())
    model, _ = load_model(str(tmp_path / "run"))
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())

    values = configure(*TINY, "trainer.device=cpu", f"run.root={tmp_path}")
    runtime = Runtime(from_mapping(values), DistEnv())
    metrics = Evaluator(build_task(from_mapping(values), runtime.group), runtime).run(model, "val")
    runtime.close()
    assert metrics["loss"] == pytest.approx(read_result(tmp_path / "run")["val_loss"], abs=1e-6)
