"""Which sinks get which metrics, on which rank."""

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
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError
from mingpt_ddp.metrics import mfu
from mingpt_ddp.metrics.jsonl import METRICS
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.models import build_model, flops_per_token

CPU = torch.device("cpu")


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
    return MetricsProcessor(runtime, text_task(config), loader, model, 0, times)


def train(processor: MetricsProcessor, step: int) -> dict[str, float]:
    processor.meter.record({"loss": torch.tensor(4.0)}, torch.tensor(1.0), data_time_s=0.0)
    return processor.log_train(step, 9, nn.Linear(1, 1), lr=1e-3, goodput=1.0)


def read_back(directory) -> EventAccumulator:
    return EventAccumulator(str(directory)).Reload()


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


@pytest.mark.parametrize("rank", [0, 1])
def test_metrics_of_the_whole_run_are_written_by_rank_zero_only(
    rank, config, runtime, tmp_path, monkeypatch
):
    env = replace(runtime.group.env, rank=rank)
    monkeypatch.setattr(runtime.group, "env", env)
    processor = make(config, runtime, tmp_path, nn.Linear(1, 1))
    assert set(train(processor, 1)) == TAGS
    processor.log_evaluation(1, "val", {"loss": 3.0, "accuracy": 0.25, "bits_per_char": 4.0})
    processor.log_sample(1, "ROMEO:" if rank == 0 else None)
    processor.rollback(1)
    processor.complete(1)
    processor.close()
    (directory,) = (tmp_path / "tensorboard").iterdir()
    assert directory.name == f"rank{rank}"
    tags = read_back(directory).Tags()
    if rank == 0:
        assert set(tags["scalars"]) == {
            *TAGS,
            "speed/goodput",
            "val/loss",
            "val/accuracy",
            "val/bits_per_char",
        }
        assert {"config/text_summary", "sample/text_summary"} <= set(tags["tensors"])
        records = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
        assert [next(k for k in record if k != "step") for record in records] == [
            "start",
            "train_loss",
            "val_loss",
            "rollback",
            "complete",
        ]
    else:
        assert set(tags["scalars"]) == TAGS
        assert tags["tensors"] == []
        assert not (tmp_path / METRICS).exists()


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
    """Two ranks, each with half of the work. MFU is logged only if the vendor's peak is known."""
    monkeypatch.setattr(mfu, "vendor_peak_flops", lambda device, dtype: peak)
    model = build_model(config.model, 65, 16)
    monkeypatch.setattr(runtime.group, "world_size", 2)
    monkeypatch.setattr(runtime.group, "all_reduce", lambda values: values)
    monkeypatch.setattr(
        runtime.group, "all_gather_async", lambda row: lambda: torch.stack([row, row])
    )
    processor = make(config, runtime, tmp_path, model)
    train(processor, 1)
    processor.close()
    _, record = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    (shown,) = [line for line in log_lines if " tokens/s" in line]
    scalars = read_back(tmp_path / "tensorboard" / "rank0").Tags()["scalars"]
    if peak is None:
        assert "mfu" not in record and "speed/mfu" not in scalars and "MFU" not in shown
    else:
        expected = flops_per_token(model) * record["tokens_per_s"] / 2 / peak
        assert record["mfu"] == pytest.approx(expected)
        assert "speed/mfu" in scalars and f"MFU {expected:.1%}" in shown


def test_no_utilization_if_the_model_does_not_count_flops(config, runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(mfu, "vendor_peak_flops", lambda device, dtype: 4e9)
    processor = make(config, runtime, tmp_path, nn.Linear(1, 1))
    assert "speed/mfu" not in train(processor, 1)
    processor.close()
