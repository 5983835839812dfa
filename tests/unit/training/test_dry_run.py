"""Trial steps refuse user code that would not resume exactly before anything is written."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from tasks import text_task
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config import builders
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.keys.model_config import ModelConfig
from mingpt_ddp.config.keys.optimizer_config import AdamWConfig
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.registry import register
from mingpt_ddp.snapshots.state_dict import load_optimizer_state, optimizer_state
from mingpt_ddp.training.dry_run.trial_run import DryRun
from mingpt_ddp.training.dry_run.user_code import check_parts, check_resumes_exactly

V, T = 5, 4
BATCH = (torch.arange(8).view(2, T) % V, torch.arange(1, 9).view(2, T) % V)


@pytest.fixture(scope="module")
def config() -> Config:
    return from_mapping(configure("data.block_size=4", "trainer.batch_size=2"))


@pytest.fixture(scope="module")
def runtime(config) -> Runtime:
    return Runtime(config, DistEnv())


@pytest.fixture
def preflight(config, runtime, monkeypatch):
    """Return a function that checks a model and an optimizer. By default both are built in."""

    def run(model=None, optimizer=None, ranks: int = 1) -> None:
        for group in ("model", "optimizer"):
            for names in (builders.BUILDERS[group], GROUPS[group][1]):
                monkeypatch.setitem(names, "own", None)
                del names["own"]
        chosen = config
        register("model", "own", ModelConfig)(model or Plain)
        chosen = replace(chosen, model=ModelConfig(name="own", architecture="own"))
        if optimizer is not None:
            register("optimizer", "own", AdamWConfig)(
                lambda model, config: optimizer(model.parameters(), {"lr": 0.1})
            )
            chosen = replace(chosen, optimizer=replace(chosen.optimizer, name="own"))
        monkeypatch.setattr(runtime.group, "world_size", ranks)
        micro_batches = [MicroBatch(index, BATCH) for index in range(3)]
        loader = SimpleNamespace(
            steps_per_epoch=1, items_per_step=1, get_batch=lambda *_: micro_batches
        )
        task = text_task(chosen, vocab_size=V)
        dry_run = DryRun(runtime, task, loader, BatchPlan(6, 2, 1))
        check_resumes_exactly(dry_run, check_parts(dry_run))

    return run


class Plain(nn.Module):
    """A minimal model: a table of logits, with dropout."""

    def __init__(self, config: ModelConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)

    def hidden(self, tokens: Tensor) -> Tensor:
        return F.dropout(self.scores(tokens), 0.5, self.training)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.hidden(tokens)
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


class PlainSGD(torch.optim.Optimizer):
    """Plain SGD. The classes below add state to it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.scale(p, self.state[p]))

    def scale(self, parameter: Tensor, state: dict[str, object]) -> float:
        return 1.0


# Accepted


class WithBuffer(Plain):
    """A model with buffers: a running mean, as in batch normalization, and a mask."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.register_buffer("mean", torch.zeros(V))
        self.register_buffer("mask", torch.ones(V, dtype=torch.bool))

    def hidden(self, tokens):
        scores = super().hidden(tokens)
        if self.training:
            self.mean.lerp_(scores.detach().mean(dim=(0, 1)), 0.1)
        return (scores - self.mean) * self.mask


class Tied(Plain):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.head = nn.Linear(V, V, bias=False)
        self.head.weight = self.scores.weight

    def hidden(self, tokens):
        return self.head(super().hidden(tokens))


class NumericState(PlainSGD):
    """An optimizer whose state has numbers of every type, and tensors unlike the parameter."""

    def scale(self, parameter, state):
        state["step"] = state.get("step", 0) + 1
        state["fine"] = state.get("fine", 0.1) * 1.1  # needs more precision than float32
        state["odd"] = not state.get("odd", False)
        state["sum"] = state.get("sum", torch.zeros(3, dtype=torch.float64)) + 1 / 3
        state["nothing"] = None
        assert type(state["step"]) is int and type(state["odd"]) is bool
        return state["fine"] * state["step"] * float(state["sum"].sum())


class RandomStep(PlainSGD):
    def scale(self, parameter, state):
        return torch.rand(()).item()


class BFloat16(Plain):
    """A model that computes everything in bf16, including the loss."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.to(torch.bfloat16)


@pytest.mark.parametrize("model", [Plain, WithBuffer, Tied, BFloat16])
def test_models_that_resume_exactly(model, preflight):
    preflight(model)


@pytest.mark.parametrize("optimizer", [PlainSGD, NumericState, RandomStep])
def test_optimizers_that_resume_exactly(optimizer, preflight):
    preflight(optimizer=optimizer)


def test_numbers_in_optimizer_state_are_restored():
    model = nn.Linear(2, 2)
    optimizer = NumericState(model.parameters(), {"lr": 0.1})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_state(model, optimizer).items()}
    assert set(saved) == {
        f"{n}:{key}"
        for n in ("weight", "bias")
        for key in ("step:int", "fine:float", "odd:bool", "sum")
    }
    other = NumericState(model.parameters(), {"lr": 0.1})
    load_optimizer_state(model, other, saved)
    for p in model.parameters():
        old, new = optimizer.state[p], other.state[p]
        assert [type(new[key]) for key in ("step", "fine", "odd")] == [int, float, bool]
        assert all(new[key] == old[key] for key in ("step", "fine", "odd"))
        assert torch.equal(new["sum"], old["sum"]) and new["sum"].dtype == torch.float64


# Refused


class PythonRandom(Plain):
    def hidden(self, tokens):
        return super().hidden(tokens) * random.random()


class Counter(Plain):
    calls = 0

    def hidden(self, tokens):
        self.calls += self.training
        return super().hidden(tokens) * self.calls


class OtherWeights(Plain):
    seeds = itertools.count()

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        nn.init.normal_(
            self.scores.weight, generator=torch.Generator().manual_seed(next(self.seeds))
        )


class LogitsOfTheLast(Plain):
    def forward(self, tokens, targets=None):
        return (
            super().forward(tokens, targets) if targets is not None else self.hidden(tokens)[:, -1]
        )


class Losses(Plain):
    def forward(self, tokens, targets=None):
        logits = self.hidden(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


class Complex(Plain):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))


class LooksAhead(Plain):
    def hidden(self, tokens):
        return super().hidden(tokens) + super().hidden(tokens.flip(1)) / 10


class MixesSequences(Plain):
    def hidden(self, tokens):
        return super().hidden(tokens).cumsum(dim=0)


class AlwaysDropsOut(Plain):
    def hidden(self, tokens):
        return F.dropout(self.scores(tokens), 0.5)


class Sum(Plain):
    def forward(self, tokens, targets=None):
        return super().forward(tokens, targets) * (1 if targets is None else targets.numel())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            LooksAhead,
            "the model own is not causal: its logits at a position depend on later tokens",
        ),
        (
            MixesSequences,
            "the model own mixes sequences: the logits of a sequence depend on the other sequences",
        ),
        (
            AlwaysDropsOut,
            (
                "the model own is random in evaluation mode: apply dropout only if self.training "
                "is true"
            ),
        ),
        (
            Sum,
            r"must return the mean cross-entropy of its logits, which in evaluation mode is \d\.\d{4} nats, not 1",  # noqa: E501
        ),
        (PythonRandom, "the model own would not resume exactly: its loss depends on more than"),
        (Counter, "the model own would not resume exactly: its loss depends on more than"),
        (
            OtherWeights,
            "the model own would not resume exactly: its initial weights depend on more than",
        ),
        (LogitsOfTheLast, r"model\(tokens\) must return logits of shape \(2, 1, 5\), not \(2, 5\)"),
        (Losses, r"model\(tokens, targets\) must return the mean loss, a scalar, not \(8,\)"),
        (Complex, "the model's phases cannot be saved: its type is torch.complex64"),
        (lambda *_: "no module", "the model own must be an nn.Module, not str"),
    ],
)
def test_models_that_are_refused(model, expected, preflight):
    with pytest.raises(CodeError, match=expected):
        preflight(model)


class StateOnOptimizer(PlainSGD):
    calls = 0

    def scale(self, parameter, state):
        self.calls += 1
        return self.calls


class StateInGroup(PlainSGD):
    def scale(self, parameter, state):
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        return group["k"]


class StringState(PlainSGD):
    def scale(self, parameter, state):
        state["phase"] = "early"
        return 1.0


class SharedState(PlainSGD):
    def scale(self, parameter, state):
        self.state["all"] = {"k": 1}
        return 1.0


class ColonInName(PlainSGD):
    def scale(self, parameter, state):
        state["a:b"] = 1
        return 1.0


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (
            StateOnOptimizer,
            "the optimizer own would not resume exactly: its step depends on more than",
        ),
        (StateInGroup, "the optimizer own would not resume exactly: its step depends on more than"),
        (
            StringState,
            "the optimizer's state 'phase' of scores.weight cannot be saved: its type is str",
        ),
        (
            SharedState,
            r"the optimizer's state\['all'\] cannot be saved: its key is not a parameter",
        ),
        (ColonInName, "names without a colon"),
        (lambda *_: None, "own must be a torch.optim.Optimizer, not NoneType"),
    ],
)
def test_optimizers_that_are_refused(optimizer, expected, preflight):
    with pytest.raises(CodeError, match=expected):
        preflight(optimizer=optimizer)


class Unused(Plain):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.spare = nn.Linear(2, 2)


def test_parameters_without_gradients_are_refused_with_several_ranks(preflight):
    preflight(Unused)
    with pytest.raises(
        ConfigError, match=r"spare.weight, spare.bias of the model own have no gradient"
    ):
        preflight(Unused, ranks=2)


class Sometimes(Unused):
    """A model with stochastic depth: a layer runs in some micro-batches, drawn at random."""

    def hidden(self, tokens):
        x = super().hidden(tokens)
        if self.training and torch.rand(()) < 0.5:
            x = x + self.spare(torch.ones(2)).sum()
        return x


def test_parameters_without_a_gradient_in_one_micro_batch_are_refused_too(preflight):
    preflight(Sometimes)
    with pytest.raises(ConfigError, match=r"spare.weight, spare.bias .* have no gradient"):
        preflight(Sometimes, ranks=2)


class NeedsGradients(PlainSGD):
    """An optimizer that fails without a gradient. Its error must not hide why there is none."""

    def scale(self, parameter, state):
        return float(parameter.grad.norm() > -1)


def test_a_missing_gradient_is_named_before_the_optimizer_meets_it(preflight):
    with pytest.raises(ConfigError, match=r"spare.weight, spare.bias .* have no gradient"):
        preflight(Unused, NeedsGradients, ranks=2)
