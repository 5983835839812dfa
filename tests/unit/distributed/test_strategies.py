"""The strategy that a configuration selects, and the combinations that are refused.

Only parts that run on one rank are tested here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from torch import nn

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.distributed.device.compile import allows_compile, should_compile
from mingpt_ddp.distributed.strategies import build_strategy, check_strategy, strategy_class
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.zero1 import assign_owners
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.snapshots.state_dict import check_savable

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(*overrides: str) -> Config:
    return from_mapping(configure(*overrides))


def build(settings: Config, group: SimpleNamespace) -> Strategy:
    return build_strategy(settings.ddp, settings.trainer, CPU, group, compiles=False)


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        ("ddp.strategy=single", 2, "single trains in one process, not 2 ranks; use ddp.strategy=d"),
        ("ddp.strategy=hsdp", 3, "hsdp needs at least 4 ranks, not 3; use ddp.strategy=f"),
        (
            "ddp.strategy=fsdp optimizer=muon",
            2,
            "muon needs whole matrices.* use ddp.strategy=zero1",
        ),
        ("ddp.strategy=hsdp optimizer=muon", 4, "which ddp.strategy=hsdp splits"),
    ],
)
def test_unsupported_combinations_are_refused(words, world_size, message):
    with pytest.raises(ConfigError, match=message):
        check_strategy(config(*words.split()), world_size)


@pytest.mark.parametrize(
    ("words", "world_size", "weights", "optimizer_state"),
    [
        ("ddp.strategy=fsdp", 1, "whole", "whole"),
        ("ddp.strategy=ddp", 2, "whole", "whole"),
        ("ddp.strategy=zero1", 2, "whole", "owned"),
        ("ddp.strategy=fsdp", 2, "rows", "rows"),
        ("ddp.strategy=hsdp", 4, "rows", "rows"),
        ("ddp.tensor_parallel=2", 2, "columns", "columns"),
        ("ddp.reduction=canonical", 2, "whole", "whole"),
        ("ddp.reduction=canonical ddp.strategy=zero1", 1, "whole", "whole"),
        ("ddp.reduction=canonical ddp.strategy=zero1", 2, "whole", "owned"),
    ],
)
def test_which_weights_and_optimizer_state_a_rank_holds(
    words, world_size, weights, optimizer_state
):
    strategy = strategy_class(config(*words.split()).ddp, world_size)
    assert (strategy.weights, strategy.optimizer_state) == (weights, optimizer_state)


@pytest.mark.parametrize("hosts", [["a"] * 5, ["a", "b", "c", "d"], ["a", "a", "a", "b"]])
def test_hsdp_refuses_ranks_that_it_cannot_divide_between_nodes(hosts):
    group = SimpleNamespace(
        world_size=len(hosts), rank=0, tensor_size=1, all_gather=lambda own: hosts
    )
    with pytest.raises(
        ConfigError, match=r"ddp.strategy=hsdp needs an even number of ranks on one node.* use "
    ):
        build(config("ddp.strategy=hsdp"), group)


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
@pytest.mark.parametrize("key", ["comm_hook=fp16", "find_unused_parameters=true"])
def test_fsdp_and_hsdp_refuse_keys_that_only_ddp_supports(name, key):
    with pytest.raises(ConfigError, match=f"ddp.strategy={name} does not support ddp.comm_hook"):
        config(f"ddp.strategy={name}", f"ddp.{key}")


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_strategies_that_are_not_compiled(name):
    assert not should_compile(config(f"ddp.strategy={name}"), GPU)
    with pytest.raises(
        ConfigError, match=f"trainer.compile=true does not work with ddp.strategy={name}"
    ):
        should_compile(config(f"ddp.strategy={name}", "trainer.compile=true"), CPU)


def test_synchronized_batch_normalization_on_several_gpus_is_not_compiled():
    """torch's implementation has tensor shapes that depend on values."""
    auto = config("ddp.sync_batchnorm=true")
    wanted = config("ddp.sync_batchnorm=true", "trainer.compile=true")
    assert [allows_compile(auto, GPU, n) for n in (1, 2)] == [True, False]
    assert allows_compile(wanted, CPU, 2)
    message = r"trainer.compile=true needs ddp.sync_batchnorm=false on several GPUs; change one"
    with pytest.raises(ConfigError, match=message):
        allows_compile(wanted, GPU, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_normalization_of_torch_over_ranks_on_cpus_is_refused(world_size):
    """It is refused before the run starts. torch would raise an error only in the first step."""
    group = SimpleNamespace(world_size=world_size, tensor_size=1)
    strategy = build(config("ddp.sync_batchnorm=true"), group)
    strategy.check_model(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if world_size == 1:
        strategy.check_model(model)
        return
    message = r"ddp.sync_batchnorm=true needs GPUs for 1, a BatchNorm1d of torch; on CPUs use the "
    with pytest.raises(ConfigError, match=message):
        strategy.check_model(model)
    model[1].over_all_ranks = False  # marks a layer that computes the statistics itself
    strategy.check_model(model)
    assert strategy.prepare(model)[1].over_all_ranks


def test_owners_are_balanced_and_deterministic():
    model = nn.Sequential(*(nn.Linear(n, n) for n in (3, 17, 8, 8, 2)))
    model[0].bias.requires_grad = False
    owners = assign_owners(model, 3)
    assert owners == assign_owners(model, 3)
    assert owners.keys() == {name for name, _ in model.named_parameters()} - {"0.bias"}
    loads = [
        sum(p.numel() for name, p in model.named_parameters() if owners.get(name) == r)
        for r in range(3)
    ]
    assert loads == [289, 89, 87]  # the largest parameter alone makes up the first load


def test_optimizer_state_that_is_not_divided_by_rows_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    check_savable(model, optimizer)
    with pytest.raises(CodeError, match=r"state 'row_var' of weight .* use ddp.strategy=zero1"):
        check_savable(model, optimizer, by_rows=True)
