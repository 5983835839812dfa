"""One training step: gradients, anomalies, clipping and schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from tasks import take_step, text_task, trainable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.training.test_actions import Noted

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.data.rng import derive_seed, seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.optim.lr_schedule import get_lr, weight_decay_factor
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.training.hooks.actions import Actions
from mingpt_ddp.training.train_step import TrainStep

V, T = 8, 4


def config_of(*overrides: str) -> Config:
    return from_mapping(configure("model=gpt_nano", "trainer.device=cpu", *overrides))


class Table(nn.Module):
    """A model that is a table of logits with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Embedding(V, V)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = F.dropout(self.scores(tokens), 0.5, self.training)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FixedLoader:
    """A loader that gives the same two micro-batches of two sequences in every step."""

    steps_per_epoch = 10
    items_per_step = 4 * T

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        tokens = torch.arange(4 * T).view(2, 2, T) % V
        return [MicroBatch(index, (tokens[index], tokens[1 - index])) for index in (0, 1)]


def step_of(
    model: nn.Module,
    *overrides: str,
    ema: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> TrainStep:
    config = config_of("trainer.max_epochs=null", "trainer.max_steps=10", *overrides)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = Runtime(config, DistEnv())
    task = text_task(config)
    parts = trainable(model, optimizer, ema)
    return TrainStep(runtime, task, FixedLoader(), BatchPlan(4, 2, 1), parts)


def expected_gradients(step: int) -> tuple[Tensor, float]:
    """Return the gradients of the mean of both losses, and the mean."""
    model = Table()
    losses = []
    for micro in FixedLoader().get_batch(step, BatchPlan(4, 2, 1), 0):
        torch.manual_seed(derive_seed("dropout", 1337, step, micro.index))
        losses.append(model(*micro.batch))
    mean = torch.stack(losses).mean()
    mean.backward()
    return model.scores.weight.grad, mean.item()


def test_a_step_averages_its_micro_batches():
    """Each has its own random numbers. Then the step clips, and updates with the scheduled rate."""
    model = Table()
    before = model.scores.weight.detach().clone()
    train_step = step_of(
        model,
        "run.seed=1337",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=constant",
        "optimizer.lr=0.5",
        "optimizer.weight_decay=0",
        "trainer.grad_norm_clip=null",
    )
    losses = train_step.passes(3)
    gradients, loss = expected_gradients(3)
    torch.testing.assert_close(model.scores.weight.grad, gradients)
    assert float(losses["loss"]) == pytest.approx(loss)
    assert float(train_step.clip()) == pytest.approx(float(gradients.norm()))
    assert train_step.update(3) == 0.5
    torch.testing.assert_close(model.scores.weight.detach(), before - 0.5 * gradients)
    assert model.scores.weight.grad is None


def test_a_discarded_step_does_not_change_weights_optimizer_or_average():
    model = Table()
    before = model.scores.weight.detach().clone()
    train_step = step_of(model, "run.seed=1337", ema=0.5)
    losses = train_step.passes(1)
    assert float(losses["loss"]) == pytest.approx(expected_gradients(1)[1])
    assert train_step.clip() > 0
    train_step.discard()
    assert torch.equal(model.scores.weight, before) and model.scores.weight.grad is None
    assert not train_step.optimizer.state
    assert torch.equal(train_step.average.state()["ema"]["scores.weight"], before)


def test_the_average_follows_the_update():
    model = Table()
    before = model.scores.weight.detach().clone()
    train_step = step_of(model, "optimizer.warmup_steps=0", ema=0.99)
    take_step(train_step, 1)
    after = model.scores.weight.detach()
    expected = before + (1 - 2 / 11) * (after - before)
    torch.testing.assert_close(train_step.average.state()["ema"]["scores.weight"], expected)


def test_an_overflow_of_the_loss_scale_skips_the_update_and_lowers_the_scale():
    model = Table()
    train_step = step_of(model, "trainer.precision=fp16")
    train_step.runtime.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model.scores.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = model.scores.weight.detach().clone()
    assert not torch.isfinite(take_step(train_step, 1).grad_norm)
    assert torch.equal(model.scores.weight, before)
    assert train_step.runtime.scaler.get_scale() == 512.0


def test_hooks_do_not_run_in_a_step_whose_loss_scale_overflows():
    updated = []

    def note(step: int, weights: dict[str, Tensor]) -> None:
        updated.append(step)

    model = Table()
    train_step = step_of(model, "trainer.precision=fp16")
    train_step.runtime.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train_step.actions = Actions(
        train_step.task.config, train_step.runtime, [("gradients x", Noted), ("update y", note)]
    )
    take_step(train_step, 1)
    handle = model.scores.weight.register_hook(lambda gradient: gradient * float("inf"))
    take_step(train_step, 2)
    handle.remove()
    take_step(train_step, 3)
    assert train_step.actions.actions[0].hook.steps == updated == [1, 3]


class Measuring:
    """A hook that keeps the gradients of each micro-batch, in one list per step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.by_step: dict[int, Any] = {}

    def micro_batch(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        self.gradients.append(gradients)
        measured = {name: gradient.clone() for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()  # must not matter, since it is a copy
        return measured

    def __call__(self, step: int, gradients: Any, micro_batches: dict[str, Tensor]) -> None:
        self.by_step[step] = micro_batches

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Load nothing."""


def measuring_step(model: nn.Module, *overrides: str) -> tuple[TrainStep, Measuring]:
    """Return a step and its hook, which measures each micro-batch."""
    train_step = step_of(model, *overrides)
    train_step.actions = Actions(
        train_step.task.config, train_step.runtime, [("gradients x", Measuring)]
    )
    train_step.actions.watch_passes(model)
    return train_step, train_step.actions.actions[0].hook


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_hook_gets_the_separate_gradients_of_each_micro_batch(scale):
    """There may be a loss scale, other passes before, and an unused parameter."""
    model = Table()
    model.unused = nn.Parameter(torch.ones(2))
    precision = "fp32" if scale is None else "fp16"
    train_step, hook = measuring_step(model, "run.seed=1337", f"trainer.precision={precision}")
    if scale is not None:
        train_step.runtime.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    train_step.passes(1)
    model.zero_grad()
    train_step.passes(2)
    averaged = model.scores.weight.grad / (scale or 1)
    train_step.clip()
    expected = []
    for micro in FixedLoader().get_batch(2, BatchPlan(4, 2, 1), 0):
        plain = Table()
        torch.manual_seed(derive_seed("dropout", 1337, 2, micro.index))
        plain(*micro.batch).backward()
        expected.append(plain.scores.weight.grad)
    [found] = hook.by_step.values()
    assert found.keys() == {"scores.weight"}
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if scale else {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(found["scores.weight"], torch.stack(expected).double(), **tolerance)
    torch.testing.assert_close(found["scores.weight"].mean(dim=0).float(), averaged)


def test_gradients_are_measured_in_pieces_too():
    """A reentrant checkpoint runs a separate backward pass for each of its calls."""
    model = Table()
    once = Table.forward

    def twice(tokens: Tensor, targets: Tensor) -> Tensor:
        start = torch.zeros((), requires_grad=True)
        for _ in range(2):
            start = checkpoint(
                lambda start: start + once(model, tokens, targets), start, use_reentrant=True
            )
        return start

    model.forward = twice
    train_step, hook = measuring_step(model, "trainer.precision=fp32")
    train_step.passes(1)
    averaged = model.scores.weight.grad.clone()
    train_step.clip()
    measured = hook.by_step[1]["scores.weight"]
    torch.testing.assert_close(measured.mean(dim=0).float(), averaged)


def test_a_diagnosis_names_the_loss_or_the_gradient():
    model = Table()
    train_step = step_of(model)
    assert "not reproducible when the step is repeated" in train_step.diagnose(1)
    model.scores.weight.register_hook(lambda gradient: gradient * float("inf"))
    named = "the gradient of scores.weight in micro-batch 0"
    assert train_step.diagnose(1) == f"rank 0: {named}"
    with torch.no_grad():
        model.scores.weight[0] = float("nan")
    assert train_step.diagnose(1) == "rank 0: the loss of micro-batch 0"
    assert model.scores.weight.grad is None


def test_an_update_has_its_own_random_numbers(monkeypatch):
    """For optimizers that draw some, they depend on the run's seed and the step."""
    train_step = step_of(Table(), "run.seed=5")
    drawn: list[Tensor] = []
    original = train_step.optimizer.step
    monkeypatch.setattr(
        train_step.optimizer, "step", lambda: drawn.append(torch.rand(3)) or original()
    )
    take_step(train_step, 4)
    torch.manual_seed(derive_seed("update", 5, 4))
    assert torch.equal(drawn[0], torch.rand(3))


def test_the_losses_of_a_task_are_averaged_by_name(monkeypatch):
    """The gradients are the gradients of their sum."""
    model = Table()
    train_step = step_of(model)

    def loss(parallel_model: nn.Module, batch: Any) -> dict[str, Tensor]:
        whole = parallel_model(*batch)
        return {"a": 0.25 * whole, "b": 0.75 * whole}

    monkeypatch.setattr(train_step.task, "loss", loss)
    gradients, whole = expected_gradients(3)
    losses = train_step.passes(3)
    expected = {"loss": whole, "loss_a": 0.25 * whole, "loss_b": 0.75 * whole}
    assert {name: float(value) for name, value in losses.items()} == pytest.approx(expected)
    torch.testing.assert_close(model.scores.weight.grad, gradients)


def test_groups_have_their_own_multiple_of_rate_and_decay():
    """A rollback loads the optimizer's state, so that torch replaces the groups. They keep it."""
    layers = nn.Linear(1, 1), nn.Linear(1, 1)
    shares = [{"lr_ratio": 0.1, "weight_decay": 0.5}, {"weight_decay": 0.25}]
    groups = [
        {"params": [*layer.parameters()], **share}
        for layer, share in zip(layers, shares, strict=True)
    ]
    step = step_of(
        nn.Sequential(*layers),
        "optimizer.lr=0.5",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=linear",
        "optimizer.min_lr_ratio=0",
        "optimizer.weight_decay_schedule=linear",
        optimizer=torch.optim.SGD(groups, lr=0.1),
    )
    step.set_lr(1)
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    lr, factor = step.set_lr(5), weight_decay_factor(5, step.lr_config, 10)
    assert lr == get_lr(5, step.lr_config, 10) != 0.5
    assert 0 < factor < 1
    found = [(group["lr"], group["weight_decay"]) for group in step.optimizer.param_groups]
    assert found == [(lr * 0.1, 0.5 * factor), (lr, 0.25 * factor)]


def with_gradients(scale: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)).to(dtype)
    for parameter in model[:2].parameters():  # the last layer has no gradients
        parameter.grad = scale * torch.randn_like(parameter)
    return model


def clip(model: nn.Module, limit: float | None) -> Tensor:
    strategy = Runtime(config_of(), DistEnv()).strategy
    return strategy.clip_grad_norm(list(model.parameters()), limit)


@pytest.mark.parametrize("scale", [1e-3, 10.0, float("inf"), float("nan")])
@pytest.mark.parametrize("limit", [0.5, None])
def test_clipping_equals_torch_s_clipping(scale, limit):
    ours, theirs = with_gradients(scale), with_gradients(scale)
    norm = clip(ours, limit)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
    assert torch.equal(norm.nan_to_num(), expected.nan_to_num())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None
        elif limit is not None or scale < float("inf"):
            # Without a limit, torch would multiply by inf / inf.
            assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())


def test_a_step_clips_to_the_configured_norm():
    model = Table()
    before = model.scores.weight.detach().clone()
    settings = ["optimizer.warmup_steps=0", "optimizer.schedule=constant", "optimizer.lr=1"]
    take_step(step_of(model, *settings, "trainer.grad_norm_clip=0.001"), 1)
    assert float((model.scores.weight.detach() - before).norm()) == pytest.approx(0.001, rel=1e-3)


def test_a_step_clips_each_value():
    model = Table()
    train_step = step_of(model, "trainer.grad_norm_clip=null", "trainer.grad_value_clip=0.01")
    train_step.passes(1)
    whole = model.scores.weight.grad.clone()
    norm = train_step.clip()
    assert torch.equal(norm, whole.norm())  # the norm before clipping
    assert torch.equal(model.scores.weight.grad, whole.clamp(-0.01, 0.01))
    assert whole.abs().max() > 0.01


def test_the_seed_equals_torch_s_seed():
    seed_everything("dropout", 1, 2, 3)
    ours = torch.get_rng_state()
    torch.manual_seed(derive_seed("dropout", 1, 2, 3))
    assert torch.equal(ours, torch.get_rng_state())
