"""Schedules of learning rate and weight decay, and the parameter groups."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tasks import gpt_config
from torch import nn

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.optimizer_config import (
    SCHEDULES,
    AdamWConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
)
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models import build_model
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.lr_schedule import check_schedule, get_lr, scale_lr, weight_decay_factor

# Warm-up to a peak of 2 in 10 steps, then 100 steps down to a tenth of the peak.
SCHEDULE = {
    "schedule": "cosine",
    "schedule_steps": None,
    "warmup_steps": 10,
    "min_lr_ratio": 0.1,
    "decay_ratio": 0.2,
}
ADAMW = AdamWConfig(name="adamw", lr=2.0, weight_decay=0.5, **SCHEDULE, betas=(0.9, 0.99), eps=1e-8)
SGD = SGDConfig(name="sgd", lr=2.0, weight_decay=0.5, **SCHEDULE, momentum=0.9, nesterov=True)
STEPS = 110


def schedule(name: str, **changes) -> OptimizerConfig:
    return replace(ADAMW, schedule=name, **changes)


WARM_UP = {1: 0.2, 5: 1.0, 10: 2.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # cosine: 0.2 + 1.8 (1 + cos(pi progress)) / 2. At 1/4, (1 + 0.70711) / 2 = 0.85355.
        (
            "cosine",
            {11: 1.9995559, 35: 1.736396, 60: 1.1, 85: 0.463604, 110: 0.2, 111: 0.2, 500: 0.2},
        ),
        ("linear", {11: 1.982, 35: 1.55, 60: 1.1, 85: 0.65, 110: 0.2, 111: 0.2, 500: 0.2}),
        # wsd: the decay takes the last fifth of 110 steps, so it starts after step 88.
        ("wsd", {11: 2.0, 60: 2.0, 88: 2.0, 99: 1.1, 109: 0.281818, 110: 0.2, 111: 0.2, 500: 0.2}),
        ("constant", {11: 2.0, 60: 2.0, 110: 2.0, 500: 2.0}),
    ],
)
def test_the_schedule_from_its_start_to_beyond_its_end(name, expected):
    """A run may end within its warm-up. `schedule_steps` overrides the length of the run."""
    expected = {**WARM_UP, **expected}
    rates = {step: get_lr(step, schedule(name), STEPS) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-6)
    own = schedule(name, schedule_steps=STEPS)
    assert {step: get_lr(step, own, 1000) for step in expected} == rates
    slow = schedule(name, warmup_steps=100)
    assert [get_lr(step, slow, 20) for step in (10, 20)] == pytest.approx([0.2, 0.4])
    assert get_lr(101, slow, 100) == pytest.approx(2.0 if name == "constant" else 0.2)
    never_falls = schedule(name, min_lr_ratio=1.0)
    assert {get_lr(step, never_falls, STEPS) for step in (10, 50, 110, 200)} == {2.0}


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_learning_rate_never_rises_after_the_warm_up_and_never_jumps(name):
    rates = [get_lr(step, schedule(name), STEPS) for step in range(10, STEPS + 1)]
    falls = [before - after for before, after in pairwise(rates)]
    # wsd falls fastest, by 1.8 in 22 steps.
    assert all(-1e-12 <= fall <= 1.8 / 22 + 1e-9 for fall in falls)
    assert sum(falls) == pytest.approx(1.8)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_decay_begins_after_the_given_step(name):
    held = schedule(name, decay_from=100)
    assert get_lr(100, held, STEPS) == 2.0 > get_lr(101, held, STEPS)


@pytest.mark.parametrize("name", ["constant", "own"])
def test_a_schedule_without_this_decay_refuses_the_step_where_it_begins(name, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "own", ScheduleConfig)
    with pytest.raises(ConfigError, match=rf"decay_from=50 has no effect with .*schedule={name};"):
        schedule(name, decay_from=50)


def test_without_a_warm_up_the_schedule_starts_at_the_first_step():
    assert get_lr(1, schedule("constant", warmup_steps=0), 10) == 2.0
    linear = schedule("linear", warmup_steps=0, min_lr_ratio=0.0)
    assert [get_lr(step, linear, 10) for step in (1, 10)] == pytest.approx([1.8, 0.0])


# Parameter groups


@pytest.fixture
def model() -> nn.Module:
    return build_model(gpt_config(n_embd=8), 11, 4)


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_matrices_are_decayed_and_vectors_are_not(model, config):
    """The gradients are zero, so only the decay is applied.

    AdamW reduces the weight by a factor of 1 - lr * weight_decay. SGD adds the decay to the
    gradient, which Nesterov momentum counts 1 + 0.9 times. Frozen parameters are left out.
    """
    model.token_embedding.weight.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, replace(config, lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = 1 - 0.1 * 0.5 * (1 if config is ADAMW else 1.9)
    for name, parameter in model.named_parameters():
        is_decayed = parameter.dim() >= 2 and parameter.requires_grad
        expected = before[name] * (kept if is_decayed else 1)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(members) == len(before) - 1


def test_the_settings_reach_the_optimizer(model):
    adamw, sgd = build_optimizer(model, ADAMW), build_optimizer(model, SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(sgd, torch.optim.SGD)
    for group in adamw.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (2.0, (0.9, 0.99), 1e-8)
    for group in sgd.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"]) == (2.0, 0.9, True)


def test_a_model_with_only_matrices_has_one_group():
    (group,) = build_optimizer(nn.Linear(3, 2, bias=False), ADAMW).param_groups
    assert group["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("scaling", "batch", "factor"),
    [("none", 48, 1), ("linear", 48, 4), ("sqrt", 48, 2), ("linear", 6, 0.5)],
)
def test_the_learning_rate_is_scaled_with_the_batch(scaling, batch, factor):
    config = schedule("cosine", lr_scaling=scaling, reference_batch_size=12)
    scaled = scale_lr(config, batch)
    for step in (1, 5, 50, STEPS):
        assert get_lr(step, scaled, STEPS) == pytest.approx(factor * get_lr(step, config, STEPS))
    assert scale_lr(schedule("cosine"), batch) == schedule("cosine")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {1: 1.0, 55: 1.0, 110: 1.0, 500: 1.0}),
        # The factor rises from 1 to 3 over 110 steps.
        ("linear", {11: 1.2, 55: 2.0, 110: 3.0, 500: 3.0}),
        # 1 + (1 - cos(pi progress)). At progress 1/10, the term in brackets is 1 - 0.95106.
        ("cosine", {11: 1.0489435, 55: 2.0, 110: 3.0, 500: 3.0}),
        ("lr", {5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
    ],
)
def test_the_schedule_of_weight_decay(name, expected):
    config = schedule("cosine", weight_decay_schedule=name, final_weight_decay_ratio=3.0)
    factors = {step: weight_decay_factor(step, config, STEPS) for step in expected}
    assert factors == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("own", "error"),
    [
        (lambda step, steps: 0.5, r"must take \(step, steps, config\)"),
        (lambda step, steps, config: math.nan if step == 6 else 1.0, "returned nan at step 6"),
    ],
)
def test_a_user_schedule_that_fails(own, error, monkeypatch):
    """It may fail at a step that was not tried before the start. No weight becomes NaN."""
    monkeypatch.setitem(SCHEDULES, "own", ScheduleConfig)
    monkeypatch.setitem(BUILDERS["schedule"], "own", own)
    with pytest.raises(CodeError, match=f"the schedule own.* {error}"):
        check_schedule(schedule("own"), run_steps=1000)
        get_lr(6, schedule("own"), 1000)
