"""One training step: its order, what an anomaly prevents, clipping, schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from tasks import text_task, trainable
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.data.rng import derive_seed, seed_everything
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.training.step_control import StepControl
from mingpt_ddp.training.train_step import TrainStep, count_steps

V, T = 8, 4


def config_of(*overrides: str) -> Config:
    return from_mapping(configure("model=gpt_nano", "trainer.device=cpu", *overrides))


class Table(nn.Module):
    """A table of logits, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Embedding(V, V)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = F.dropout(self.scores(tokens), 0.5, self.training)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FixedLoader:
    """Two micro-batches of two sequences, the same in every step."""

    steps_per_epoch = 10
    items_per_step = 4 * T

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        tokens = torch.arange(4 * T).view(2, 2, T) % V
        return [MicroBatch(index, (tokens[index], tokens[1 - index])) for index in (0, 1)]


class Recorder(StepControl):
    """Notes when each of its methods is called, and the weights then."""

    def __init__(self, model: nn.Module, anomaly: str | None = None) -> None:
        self.model = model
        self.anomaly = anomaly
        self.calls: list[str] = []
        self.gradients: Tensor = torch.empty(0)

    def wait_for_staging(self) -> None:
        self.calls.append("staging")
        self.gradients = self.model.scores.weight.grad.clone()

    def exchange_flags(self, loss: Tensor) -> Any:
        self.calls.append("send flags")

        def receive() -> Any:
            self.calls.append("receive flags")
            return SimpleNamespace(loss=float(loss))

        return receive

    def find_anomaly(self, flags: Any, grad_norm: Tensor) -> str | None:
        self.calls.append("anomaly")
        return self.anomaly


def step_of(
    model: nn.Module, *overrides: str, control: StepControl | None = None, ema: float | None = None
) -> TrainStep:
    config = config_of("trainer.max_epochs=null", "trainer.max_steps=10", *overrides)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = Runtime(config, DistEnv())
    task = text_task(config)
    parts = trainable(model, optimizer, ema)
    return TrainStep(runtime, task, FixedLoader(), BatchPlan(4, 2, 1), parts, control)


def expected_gradients(step: int) -> tuple[Tensor, float]:
    """Return the gradients of the mean of both losses, and that mean."""
    model = Table()
    losses = []
    for micro in FixedLoader().get_batch(step, BatchPlan(4, 2, 1), 0):
        torch.manual_seed(derive_seed("dropout", 1337, step, micro.index))
        losses.append(model(*micro.batch))
    mean = torch.stack(losses).mean()
    mean.backward()
    return model.scores.weight.grad, float(mean)


def test_a_step_averages_its_micro_batches():
    """Each with its own random numbers; then it clips, and updates with the scheduled rate."""
    model = Table()
    before = model.scores.weight.detach().clone()
    recorder = Recorder(model)
    train_step = step_of(
        model,
        "run.seed=1337",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=constant",
        "optimizer.lr=0.5",
        "optimizer.weight_decay=0",
        "trainer.grad_norm_clip=null",
        control=recorder,
    )
    result = train_step.run(3)
    gradients, loss = expected_gradients(3)
    torch.testing.assert_close(recorder.gradients, gradients)
    assert float(result.losses["loss"]) == pytest.approx(loss)
    assert float(result.grad_norm) == pytest.approx(float(gradients.norm()))
    torch.testing.assert_close(model.scores.weight.detach(), before - 0.5 * gradients)
    assert (result.lr, result.anomaly, model.scores.weight.grad) == (0.5, None, None)
    order = ["staging", "send flags", "receive flags", "anomaly"]
    assert recorder.calls == order


def test_a_pass_that_only_others_need_changes_nothing(monkeypatch):
    """Its weight is 0: neither the gradients nor the losses contain it."""
    alone, padded = Table(), Table()
    result = step_of(alone).run(1)
    pad = [MicroBatch(1, FixedLoader().get_batch(1, BatchPlan(4, 2, 1), 0)[1].batch, weight=0.0)]
    monkeypatch.setattr(Strategy, "pad", lambda self, batch, total: [*batch, *pad])
    again = step_of(padded).run(1)
    assert torch.equal(alone.scores.weight, padded.scores.weight)
    assert torch.equal(result.losses["loss"], again.losses["loss"])


def test_an_anomaly_leaves_weights_optimizer_and_average_as_they_are():
    model = Table()
    before = model.scores.weight.detach().clone()
    train_step = step_of(model, control=Recorder(model, "a spike"), ema=0.5)
    result = train_step.run(1)
    assert (result.anomaly, result.lr) == ("a spike", 0.0)
    assert torch.equal(model.scores.weight, before) and model.scores.weight.grad is None
    assert not train_step.optimizer.state
    assert torch.equal(train_step.average.state()["ema"]["scores.weight"], before)


def test_the_average_follows_the_update():
    model = Table()
    before = model.scores.weight.detach().clone()
    train_step = step_of(model, "optimizer.warmup_steps=0", ema=0.99)
    train_step.run(1)
    after = model.scores.weight.detach()
    expected = before + (1 - 2 / 11) * (after - before)
    torch.testing.assert_close(train_step.average.state()["ema"]["scores.weight"], expected)


def test_an_overflow_of_the_loss_scale_skips_the_update_and_lowers_the_scale():
    model = Table()
    train_step = step_of(model, "trainer.precision=fp16")
    train_step.runtime.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model.scores.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = model.scores.weight.detach().clone()
    result = train_step.run(1)
    assert not torch.isfinite(result.grad_norm)
    assert torch.equal(model.scores.weight, before)
    assert train_step.runtime.scaler.get_scale() == 512.0


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


def with_gradients(scale: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)).to(dtype)
    for parameter in model[:2].parameters():  # the last layer has none
        parameter.grad = scale * torch.randn_like(parameter)
    return model


def clip(model: nn.Module, limit: float | None) -> Tensor:
    strategy = Runtime(config_of(), DistEnv()).strategy
    return strategy.clip_grad_norm(list(model.parameters()), limit)


@pytest.mark.parametrize("scale", [1e-3, 10.0, float("inf"), float("nan")])
@pytest.mark.parametrize("limit", [0.5, None])
def test_clipping_equals_that_of_torch(scale, limit):
    ours, theirs = with_gradients(scale), with_gradients(scale)
    norm = clip(ours, limit)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
    assert torch.equal(norm.nan_to_num(), expected.nan_to_num())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None
        elif limit is not None or scale < float("inf"):
            # without a limit torch multiplies by inf / inf
            assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())


def test_a_step_clips_to_the_configured_norm():
    model = Table()
    before = model.scores.weight.detach().clone()
    settings = ["optimizer.warmup_steps=0", "optimizer.schedule=constant", "optimizer.lr=1"]
    step_of(model, *settings, "trainer.grad_norm_clip=0.001").run(1)
    assert float((model.scores.weight.detach() - before).norm()) == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("limit", [1.0, None])
def test_a_model_without_gradients(limit):
    assert clip(nn.Linear(1, 1), limit) == 0


def test_weight_decay_follows_its_schedule_after_a_rollback():
    """Which loads the optimizer's state: torch replaces the parameter groups."""
    model = nn.Linear(1, 1)
    step = step_of(model, "optimizer.weight_decay_schedule=linear", "optimizer.warmup_steps=0")
    step.optimizer.param_groups[0]["weight_decay"] = 1.0
    step = TrainStep(
        step.runtime, step.task, step.loader, step.plan, trainable(model, step.optimizer)
    )
    step.set_lr(1)
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    step.set_lr(5)
    assert step.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (["trainer.max_epochs=3", "trainer.max_steps=null"], 30),
        (["trainer.max_epochs=null", "trainer.max_steps=7"], 7),
        (["trainer.max_epochs=3", "trainer.max_steps=7"], 7),
        (["trainer.max_epochs=3", "trainer.max_steps=70"], 30),
    ],
)
def test_a_run_ends_at_the_smaller_of_its_limits(limits, steps):
    assert count_steps(config_of(*limits), 10) == steps


def test_the_seed_equals_that_of_torch():
    seed_everything("dropout", 1, 2, 3)
    ours = torch.get_rng_state()
    torch.manual_seed(derive_seed("dropout", 1, 2, 3))
    assert torch.equal(ours, torch.get_rng_state())
