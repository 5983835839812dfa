"""A model split over several devices of a rank: the same numbers, and every operation on one
device.

There may be no GPU here, so tensors on the CPU have labels, and an operation on two labels fails,
as it does on GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from multiprocess.ranks import configure
from tasks import take_step, text_task
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataloader import TokenLoader, plan_batches
from mingpt_ddp.distributed.device import devices_of_rank, first_device_of_rank, refuse_shared_gpus
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import SamplingParams, generate
from mingpt_ddp.models import build_model, placement
from mingpt_ddp.models.placement import split_blocks
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.storage.run_dir import run_name
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

B, T, V = 2, 8, 11
CPU, META = torch.device("cpu"), torch.device("meta")
DECODERS = ["gpt_nano", "modern_nano"]


def decoder(preset: str, *overrides: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(
        from_mapping(configure(f"model={preset}", "model.n_layer=3", *overrides)).model, V, T
    )


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(4, 10)
        self.net2 = nn.Linear(10, 3)

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList([self.net1, self.net2])

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.net1(x).relu())


def toy() -> ToyModel:
    torch.manual_seed(0)
    return ToyModel()


class Devices(TorchDispatchMode):
    """Two devices on one CPU: a label for each tensor, and an error for an operation on tensors of
    both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: Any = WeakIdKeyDictionary()
        self.moves: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        own = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        found = {self.labels[tensor] for tensor in own if tensor in self.labels}
        assert len(found) <= 1, f"{function} takes tensors of several devices"
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and found:
                self.labels[tensor] = next(iter(found))
        return output

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        return Move.apply(tensor, self, device.index or 0)

    def split(self, model: nn.Module, last: str) -> nn.Module:
        """Split a model; parameters whose names begin with `last` are expected on the second
        device.
        """
        split_blocks(model, [CPU, torch.device("cpu", 1)], self.move)
        for name, parameter in model.named_parameters():
            self.labels[parameter] = int(name.startswith(last))
        return model


class Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: Devices, target: int) -> Tensor:
        ctx.devices, ctx.source = devices, devices.labels.get(tensor, target)
        if ctx.source != target:
            devices.moves.append((ctx.source, target))
        devices.labels[out := tensor.clone()] = target
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.devices.labels[out := grad.clone()] = ctx.source
        return out, None, None


@pytest.mark.parametrize("preset", DECODERS)
def test_every_operation_is_on_one_device(preset):
    tokens = torch.arange(B * T).view(B, T) % V
    whole = decoder(preset)
    expected = whole(tokens, tokens)
    expected.backward()
    with Devices() as devices:
        model = devices.split(decoder(preset), "blocks.2.")
        devices.labels[tokens] = 0
        loss = model(tokens, tokens)
        assert devices.labels[loss] == 0
        loss.backward()
        assert {move for move in devices.moves} == {(0, 1), (1, 0)}
    assert torch.equal(loss, expected)
    for (name, one), two in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_an_operation_on_two_devices_is_found():
    """The check above can fail."""
    with Devices() as devices:
        model = devices.split(decoder("gpt_nano"), "blocks.1.")
        with pytest.raises(AssertionError, match="several devices"):
            model(torch.zeros(B, T, dtype=torch.int64))


def test_the_toy_model_is_split_between_its_layers():
    x = torch.ones(5, 4)
    with Devices() as devices:
        model = devices.split(toy(), "net2.")
        devices.labels[x] = 0
        assert devices.labels[model(x)] == 0
        assert devices.moves == [(0, 1), (1, 0)]
    assert [*model.state_dict()] == [*toy().state_dict()]


@pytest.fixture
def meta(monkeypatch):
    """Let `split_blocks` move parameters to the meta device, which has no values."""

    def move_tensors(module: nn.Module, device: torch.device) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to(device)))

    monkeypatch.setattr(placement, "move_tensors", move_tensors)


@pytest.mark.parametrize("preset", DECODERS)
def test_the_cache_is_where_the_blocks_are(preset, meta):
    """A device without values stands for the second one."""
    model = split_blocks(decoder(preset), [CPU, META])
    assert {name for name, p in model.named_parameters() if p.device == META} == {
        name for name, _ in model.named_parameters() if name.startswith("blocks.2.")
    }
    cache = model.new_cache(B, torch.float32)
    layers = cache if preset == "gpt_nano" else [layer.kv for layer in cache.layers]
    assert [layer.keys.device for layer in layers] == [CPU, CPU, META]
    if preset == "modern_nano":
        assert [layer.last_1.device for layer in cache.layers] == [CPU, CPU, META]


def test_activations_move_at_the_boundaries_only():
    moves: list[tuple[tuple[int, ...], str]] = []

    def move(tensor: Tensor, device: torch.device) -> Tensor:
        if device != where[0]:
            moves.append((tuple(tensor.shape), str(device)))
            where[0] = device
        return tensor

    where = [CPU]
    devices = [CPU, torch.device("cpu", 1), torch.device("cpu", 2)]
    model = split_blocks(decoder("gpt_nano", "model.n_layer=5"), devices, move)
    model(torch.zeros(B, T, dtype=torch.int64))
    shape = (B, T, model.config.n_embd)
    assert moves == [(shape, "cpu:1"), (shape, "cpu:2"), (shape, "cpu")]


def trained(overrides: list[str], steps: int = 3) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Return the losses and gradient norms, the state, and a text of a model that is trained,
    evaluated, sampled.
    """
    options = [
        "model=gpt_nano",
        "model.dropout=0.1",
        "trainer.batch_size=4",
        "trainer.micro_batch_size=2",
    ]
    config = from_mapping(configure(*options, *overrides))
    runtime = Runtime(config, DistEnv())
    task = text_task(config, vocab_size=65)
    trainable = build_trainable(runtime, task)
    model = trainable.model
    loader = TokenLoader(np.arange(1000) % 65, 16, None, batch_size=4, seed=0)
    step = TrainStep(runtime, task, loader, plan_batches(config, 1), trainable)
    numbers = []
    for number in range(1, steps + 1):
        result = take_step(step, number)
        numbers += [float(result.losses["loss"]), float(result.grad_norm)]
    tokens = list(
        generate(model, torch.zeros(1, 1, dtype=torch.int64), 20, SamplingParams(temperature=0))
    )
    return (
        numbers,
        {**model_state(model), **optimizer_state(model, trainable.optimizer)},
        torch.stack(tokens),
    )


@pytest.mark.parametrize("preset", DECODERS)
@pytest.mark.parametrize("recomputed", ["false", "true"])
@pytest.mark.parametrize(
    "options", [["optimizer=adamw"], ["optimizer=muon", "trainer.precision=bf16"]]
)
def test_the_same_bits_as_on_one_device(preset, recomputed, options):
    options = [f"model={preset}", *options, f"trainer.activation_checkpointing={recomputed}"]
    one, two = trained(options), trained([*options, "model.devices=2"])
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
    assert torch.equal(one[2], two[2])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.blocks[1].weight = self.blocks[0].weight


@pytest.mark.parametrize(
    ("model", "devices", "reason"),
    [
        (
            lambda: nn.Linear(1, 1),
            2,
            "=2 needs a model with blocks, an nn.ModuleList .* and Linear has none",
        ),
        (lambda: decoder("gpt_nano"), 4, "=4, but the model has 3 blocks; lower it"),
        (Tied, 2, "=2: Tied shares a parameter between two devices"),
    ],
)
def test_models_that_cannot_be_split_are_refused(model, devices, reason):
    with pytest.raises(ConfigError, match=f"model.devices{reason}"):
        split_blocks(model(), [CPU] * devices)


@pytest.mark.parametrize("compiled", ["true", "cuda_graphs"])
def test_compiling_is_refused(compiled):
    config = from_mapping(configure(f"trainer.compile={compiled}", "model.devices=2"))
    with pytest.raises(ConfigError, match=f"trainer.compile={compiled} needs model.devices=1"):
        Runtime(config, DistEnv())


def test_each_rank_has_its_own_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    def devices(local_rank: int, count: int) -> list[str]:
        config = from_mapping(configure("trainer.device=auto", f"model.devices={count}"))
        env = DistEnv(rank=local_rank, local_rank=local_rank, world_size=8)
        return [
            str(each)
            for each in devices_of_rank(
                first_device_of_rank(config.trainer, config.ddp, env, count), count
            )
        ]

    gpus = 5
    assert [devices(rank, 2) for rank in (0, 1)] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    with pytest.raises(
        ConfigError,
        match="local rank 2 needs GPUs 4 to 5, this machine has 5; start 2 ranks, lower",
    ):
        devices(2, 2)
    with pytest.raises(ConfigError, match=r"model.devices=6, but this machine has 5 GPUs"):
        devices(0, 6)
    gpus = 2  # a scheduler shows each process its own
    assert devices(3, 2) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="ranks 0 and 1 have the same GPU"):
        refuse_shared_gpus(["a", "b", "b", "c"], per_rank=2)


def test_the_key_renames_no_run():
    one, two = (from_mapping(configure(f"model.devices={n}")) for n in (1, 2))
    assert run_name(one) == run_name(two)


def test_muon_handles_the_matrices_of_each_device(monkeypatch, meta):
    model = split_blocks(decoder("gpt_nano"), [CPU, META])
    optimizer = build_optimizer(model, from_mapping(configure("optimizer=muon")).optimizer)
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["muon"]]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    taken = []
    monkeypatch.setattr(Muon, "_muon_step", lambda self, members, *rates: taken.append(members))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure: None)
    optimizer.step()
    assert [{p.device for p in members} for members in taken] == [{CPU}, {META}]
    assert sum(map(len, taken)) == sum(len(group["params"]) for group in optimizer.param_groups)
