"""The measured peak of the device, and the share of it that is logged."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError
from mingpt_ddp.metrics import matmul_rate as peak
from mingpt_ddp.metrics import processor as journals
from mingpt_ddp.metrics.jsonl import JSONLLogger
from mingpt_ddp.metrics.matmul_rate import MatmulUtilization, measured_matmul_flops
from mingpt_ddp.metrics.meters import TensorBoardLogger
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.models import build_model, flops_per_token

CPU = torch.device("cpu")


def test_a_product_counts_two_operations_for_each_of_n_cubed(monkeypatch):
    """A device on which every product takes 10 ms."""
    sizes = []

    def mm(a, b, out):
        sizes.append(a.shape)
        time.sleep(0.01)

    monkeypatch.setattr(torch, "mm", mm)
    limit = 2 * 256**3 / 0.01
    assert limit / 3 < measured_matmul_flops(CPU, torch.float32) <= limit
    assert set(sizes) == {(256, 256)}  # larger ones would only take longer


def test_larger_products_follow_while_they_are_quick(monkeypatch):
    sizes = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: sizes.append((len(a), a.dtype)))
    monkeypatch.setattr(peak, "PATIENCE_S", 0.001)
    measured_matmul_flops(CPU, torch.bfloat16)
    assert sorted(set(sizes)) == [(n, torch.bfloat16) for n in peak.SIZES]


def test_measuring_draws_no_random_number():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert measured_matmul_flops(CPU, torch.float32) > 1e7
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_counts_nothing_has_no_share():
    assert flops_per_token(nn.Linear(1, 1)) is None
    unknown = MatmulUtilization(None, CPU, torch.float32)
    unknown.measure()
    assert unknown.share(1000.0) is None


@pytest.mark.parametrize("count", [0, -1, None, "1", float("inf"), float("nan")])
def test_a_count_that_is_none_is_refused(count):
    model = nn.Linear(1, 1)
    model.flops_per_token = lambda: count
    with pytest.raises(CodeError, match=r"Linear.flops_per_token\(\) must give a number above 0"):
        flops_per_token(model)


def test_what_is_logged(tmp_path, monkeypatch):
    """Two ranks, of which each does half of the work; a device of 1 GFLOP/s that takes a second to measure."""
    config = from_mapping(configure("model=gpt_nano", "data.block_size=16", "trainer.batch_size=12"))
    runtime = Runtime(config, DistEnv())
    count = flops_per_token(build_model(config.model, 65, 16))
    monkeypatch.setattr(runtime.group, "world_size", 2)
    monkeypatch.setattr(runtime.group, "all_reduce", lambda values: values)
    monkeypatch.setattr(peak, "measured_matmul_flops", lambda device, dtype: {torch.float32: 1e9}[dtype])
    begin = time.perf_counter()
    monkeypatch.setattr(journals, "time", SimpleNamespace(perf_counter=iter([begin, begin + 1.0]).__next__))
    board = TensorBoardLogger(tmp_path, first_step=1, is_main=True)
    utilisation = MatmulUtilization(count, CPU, runtime.dtype)
    journal = MetricsProcessor(
        config, runtime, board, JSONLLogger(tmp_path / "metrics"), utilisation, done=0, steps=9, begun_at=0.0
    )
    for step in (1, 2):
        journal.meter.record(torch.tensor(4.0), torch.tensor(1.0), data_time_s=0.0)
        journal.log_train(step, 1e-3, nn.Linear(1, 1), goodput=1.0)
        since = journal.meter._since - time.perf_counter()
        assert (since > 0.5) == (step == 1), "the measurement counts as training"
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()][1:]
    expected = [count * line["tokens_per_s"] / 2 / 1e9 for line in lines]
    assert [line["mfu"] for line in lines] == pytest.approx(expected)
    shown = [event.value for event in EventAccumulator(str(tmp_path)).Reload().Scalars("speed/mfu")]
    assert shown == pytest.approx(expected)
