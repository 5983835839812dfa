"""ddp.reduction=canonical adds gradients in a fixed order, and refuses some keys and models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from torch import nn

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.data.dataloader import MicroBatch
from mingpt_ddp.distributed.device.compile import allows_compile
from mingpt_ddp.distributed.device.machine import canonical_threads
from mingpt_ddp.distributed.group.ordered_sum import build_reducer
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.canonical import CanonicalStrategy
from mingpt_ddp.errors import ConfigError, TrainingError
from mingpt_ddp.process.env import DistEnv

CPU = torch.device("cpu")
CANONICAL = ("ddp.reduction=canonical", "trainer.micro_batch_size=3")


def config(*overrides: str) -> Config:
    return from_mapping(configure("model=gpt_nano", *CANONICAL, *overrides))


def strategy(*overrides: str) -> CanonicalStrategy:
    runtime = Runtime(config(*overrides), DistEnv())
    assert isinstance(runtime.strategy, CanonicalStrategy)
    return runtime.strategy


def test_the_micro_batch_must_be_set():
    with pytest.raises(
        ConfigError, match=r"for up to 4 ranks, set trainer.micro_batch_size=3, for"
    ):
        Runtime(config("trainer.batch_size=12", "trainer.micro_batch_size=null"), DistEnv())
    with pytest.raises(
        ConfigError, match=r"for up to 7 ranks, set trainer.micro_batch_size=1, for"
    ):
        Runtime(config("trainer.batch_size=7", "trainer.micro_batch_size=null"), DistEnv())


@pytest.mark.parametrize(
    "key",
    [
        "ddp.strategy=fsdp",
        "ddp.comm_hook=bf16",
        "ddp.find_unused_parameters=true",
        "ddp.sync_batchnorm=true",
        "trainer.compile=true",
        "trainer.batch_size_per_rank=6",
    ],
)
def test_keys_whose_effect_depends_on_the_ranks_are_refused(key):
    with pytest.raises(ConfigError, match=f"ddp.reduction=canonical cannot .* with {key}; set it"):
        Runtime(config(key), DistEnv())


def test_compile_auto_does_not_compile_canonical_runs():
    assert not allows_compile(config(), torch.device("cuda"), world_size=2)
    assert allows_compile(config("ddp.reduction=fast"), torch.device("cuda"), world_size=2)


def test_running_statistics_are_refused():
    with pytest.raises(ConfigError, match=r"running statistics of 1, .* use GroupNorm"):
        strategy().check_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    strategy().check_model(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))


def test_parameters_of_several_types_are_refused():
    with pytest.raises(ConfigError, match=r"torch.bfloat16, torch.float32; use ddp.reduction=fast"):
        strategy().check_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))


def test_a_buffer_that_a_step_changes():
    found = strategy()
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(1))
    model.register_buffer("unknown", torch.full((2,), torch.nan))
    found.wrap(model)
    for _ in range(3):
        found.broadcast_buffers(model)
    model.seen += 1
    with pytest.raises(TrainingError, match="buffers that a forward pass does not change"):
        found.broadcast_buffers(model)


def test_a_parameter_without_a_gradient():
    found = strategy()
    with pytest.raises(TrainingError, match="needs a gradient of every parameter"):
        found.finish(MicroBatch(0, None), {"loss": torch.ones(())}, [nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(("told", "threads"), [(None, 1), ("3", 3)])
def test_one_thread_unless_omp_num_threads_is_set(monkeypatch, told, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    before = torch.get_num_threads()
    runtime = Runtime(config(), DistEnv())
    assert torch.get_num_threads() == runtime.environment()["threads"] == threads
    runtime.close()
    assert torch.get_num_threads() == before
    assert canonical_threads(from_mapping(configure("model=gpt_nano")).ddp) is None


def total(*gradients: Any) -> torch.Tensor:
    group = ProcessGroup(DistEnv(), config().ddp, job=0)
    found = build_reducer(group, len(gradients[0]), torch.float32, CPU)
    for gradient in gradients:
        found.wait()
        found.flat[: len(gradient)] = torch.tensor(gradient)
        found.send(1)
    return found.total()[: len(gradients[0])]


def test_the_order_of_the_sum():
    """1 + 2^24 rounds to 2^24 in fp32, so the order matters. The sum of two -0.0 is -0.0."""
    big = 2.0**24
    assert total([1.0], [big], [-big]).item() == 0
    assert total([big], [-big], [1.0]).item() == 1
    assert torch.signbit(total([-0.0], [-0.0])).all()
