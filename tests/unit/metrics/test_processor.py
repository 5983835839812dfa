"""Which metrics go to the log, the history and the trackers, and from which rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from tasks import text_task
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError
from mingpt_ddp.metrics import mfu
from mingpt_ddp.metrics.jsonl import METRICS
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.models import build_model, flops_per_token
from mingpt_ddp.process.env import DistEnv


@pytest.fixture(scope="module")
def config():
    return from_mapping(configure("model=gpt_nano", "data.block_size=16", "trainer.batch_size=12"))


@pytest.fixture
def runtime(config):
    return Runtime(config, DistEnv())


def make(config: Config, runtime: Runtime, tmp_path: Path, model: nn.Module) -> MetricsProcessor:
    """Return a processor for the run directory `tmp_path`."""
    config = replace(config, run=replace(config.run, root=str(tmp_path.parent), name=tmp_path.name))
    loader = SimpleNamespace(steps_per_epoch=3, items_per_step=12 * 16)
    times = StartTimes(0.0)
    return MetricsProcessor(runtime, text_task(config), loader, model, 0, times, tmp_path)


def train(processor: MetricsProcessor, step: int) -> dict[str, float]:
    processor.meter.record({"loss": torch.tensor(4.0)}, torch.tensor(1.0), data_time_s=0.0)
    return processor.log_train(step, 9, nn.Linear(1, 1), lr=1e-3, goodput=1.0)


TAGS = {
    "train/loss",
    "train/lr",
    "train/epoch",
    "train/grad_norm",
    "speed/tokens_per_s",
    "speed/step_ms",
    "speed/data_ms",
    "speed/communication_ms",
    "speed/communication_exposed_ms",
    "memory/peak_mib",
}


def test_every_metric_is_in_tensorboard_and_in_the_history(config, runtime, tmp_path):
    processor = make(config, runtime, tmp_path, nn.Linear(1, 1))
    assert set(train(processor, 1)) == TAGS
    processor.log_evaluation(1, "val", {"loss": 3.0, "accuracy": 0.25, "bits_per_char": 4.0})
    processor.log_sample(1, "ROMEO:")
    processor.rollback(1)
    processor.complete(1)
    processor.close()
    tags = EventAccumulator(str(tmp_path / "tensorboard" / "rank0")).Reload().Tags()
    evaluated = {"val/loss", "val/accuracy", "val/bits_per_char"}
    assert {*tags["scalars"]} == TAGS | evaluated | {"speed/goodput"}
    assert {"config/text_summary", "sample/text_summary"} <= {*tags["tensors"]}
    records = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    kinds = [next(key for key in record if key != "step") for record in records]
    assert kinds == ["start", "train_loss", "val_loss", "rollback", "complete"]


def test_nothing_is_logged_if_all_steps_were_skipped(config, runtime, tmp_path):
    processor = make(config, runtime, tmp_path, nn.Linear(1, 1))
    assert processor.log_train(1, 9, nn.Linear(1, 1), lr=1e-3, goodput=1.0) == {}
    processor.close()
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("count", [0, -1, None, "1", float("inf"), float("nan")])
def test_an_invalid_count_is_refused(count):
    model = nn.Linear(1, 1)
    model.flops_per_token = lambda: count
    with pytest.raises(CodeError, match=r"Linear.flops_per_token\(\) must return a number above 0"):
        flops_per_token(model)


@pytest.mark.parametrize("peak", [None, 4e9])
def test_utilization(peak, config, runtime, tmp_path, monkeypatch, log_lines):
    """MFU is logged only if the vendor's peak is known, and if the model counts its FLOPs."""
    monkeypatch.setattr(mfu, "vendor_peak_flops", lambda device, dtype: peak)
    model = build_model(config.model, 65, 16)
    processor = make(config, runtime, tmp_path, model)
    metrics = train(processor, 1)
    processor.close()
    (shown,) = [line for line in log_lines if " tokens/s" in line]
    assert ("speed/mfu" in metrics) == ("MFU" in shown) == (peak is not None)
    two_ranks = SimpleNamespace(device=None, dtype=None, group=SimpleNamespace(world_size=2))
    found = mfu.Utilization(two_ranks, model).metrics(1000.0)
    assert found == ({"speed/mfu": 1000.0 * flops_per_token(model) / 2 / peak} if peak else {})
    assert mfu.Utilization(two_ranks, nn.Linear(1, 1)).metrics(1000.0) == {}
