"""The learning rate of every step, and which parameters are decayed."""

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
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models import build_model
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.lr_schedule import check_schedule, get_lr, scale_lr, weight_decay_factor

# A peak of 2, a warm-up of 10 steps, then 100 steps down to a tenth of the peak.
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


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_the_warm_up_is_the_same_for_all(name):
    assert [get_lr(step, schedule(name), STEPS) for step in (1, 5, 10)] == pytest.approx(
        [0.2, 1.0, 2.0]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # cosine: 0.2 + 1.8 (1 + cos(pi progress)) / 2, at a quarter (1 + 0.70711) / 2 = 0.85355
        (
            "cosine",
            {11: 1.9995559, 35: 1.736396, 60: 1.1, 85: 0.463604, 110: 0.2, 111: 0.2, 500: 0.2},
        ),
        ("linear", {11: 1.982, 35: 1.55, 60: 1.1, 85: 0.65, 110: 0.2, 111: 0.2, 500: 0.2}),
        # wsd: the last fifth of 110 steps starts after step 88
        ("wsd", {11: 2.0, 60: 2.0, 88: 2.0, 99: 1.1, 109: 0.281818, 110: 0.2, 111: 0.2, 500: 0.2}),
        ("constant", {11: 2.0, 60: 2.0, 110: 2.0, 500: 2.0}),
    ],
)
def test_the_schedule_from_its_start_to_beyond_its_end(name, expected):
    rates = {step: get_lr(step, schedule(name), STEPS) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_it_never_rises_after_the_warm_up_and_never_jumps(name):
    rates = [get_lr(step, schedule(name), STEPS) for step in range(10, STEPS + 1)]
    falls = [before - after for before, after in pairwise(rates)]
    # wsd falls fastest: by 1.8 in 22 steps
    assert all(-1e-12 <= fall <= 1.8 / 22 + 1e-9 for fall in falls)
    assert sum(falls) == pytest.approx(1.8)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_schedule_steps_overrides_the_length_of_the_run(name):
    config = schedule(name, schedule_steps=STEPS)
    for step in (1, 10, 60, 99, 110, 200):
        assert get_lr(step, config, 1000) == get_lr(step, schedule(name), STEPS)


def test_without_a_warm_up_the_schedule_starts_at_the_first_step():
    assert get_lr(1, schedule("constant", warmup_steps=0), 10) == 2.0
    assert get_lr(1, schedule("linear", warmup_steps=0, min_lr_ratio=0.0), 10) == pytest.approx(1.8)
    assert get_lr(10, schedule("linear", warmup_steps=0, min_lr_ratio=0.0), 10) == 0.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_a_run_that_ends_within_its_warm_up(name):
    config = schedule(name, warmup_steps=100)
    assert [get_lr(step, config, 20) for step in (10, 20)] == pytest.approx([0.2, 0.4])
    assert get_lr(101, config, 100) == pytest.approx(2.0 if name == "constant" else 0.2)


def test_a_ratio_of_1_keeps_the_peak():
    assert {
        get_lr(step, schedule("cosine", min_lr_ratio=1.0), STEPS) for step in (10, 50, 110, 200)
    } == {2.0}


# Parameter groups


@pytest.fixture
def model() -> nn.Module:
    return build_model(
        gpt_config(n_embd=8),
        11,
        4,
    )


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_matrices_are_decayed_and_vectors_are_not(model, config):
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, config)
    groups = {
        group["weight_decay"]: {names[p] for p in group["params"]}
        for group in optimizer.param_groups
    }
    vectors = {name for name in names.values() if "norm" in name or name.endswith("bias")}
    assert groups == {0.5: set(names.values()) - vectors, 0.0: vectors}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_without_a_gradient_only_the_decay_is_applied(model, config):
    """AdamW takes lr * weight_decay off the weight; SGD's decay is a gradient, which Nesterov
    counts 1 + 0.9 times.
    """
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, replace(config, lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = 1 - 0.1 * 0.5 * (1 if config is ADAMW else 1.9)
    for name, parameter in model.named_parameters():
        expected = before[name] * (kept if parameter.dim() >= 2 else 1)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_the_settings_reach_the_optimizer(model):
    adamw, sgd = build_optimizer(model, ADAMW), build_optimizer(model, SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(sgd, torch.optim.SGD)
    for group in adamw.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (2.0, (0.9, 0.99), 1e-8)
    for group in sgd.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"]) == (2.0, 0.9, True)


def test_frozen_parameters_are_omitted(model):
    model.token_embedding.weight.requires_grad_(False)
    trained = [p for group in build_optimizer(model, ADAMW).param_groups for p in group["params"]]
    assert len(trained) == len(list(model.parameters())) - 1
    assert all(p is not model.token_embedding.weight for p in trained)


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
        # from 1 to 3 over 110 steps
        ("linear", {11: 1.2, 55: 2.0, 110: 3.0, 500: 3.0}),
        # 1 + (1 - cos(pi progress)): at a tenth 1 - 0.95106
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
        (lambda step, steps, config: math.nan if step == 6 else 1.0, "rate of step 6 is nan"),
    ],
)
def test_a_schedule_of_ones_own_that_fails(own, error, monkeypatch):
    """Also at a step that was not tried before the start: no weight becomes NaN."""
    monkeypatch.setitem(SCHEDULES, "own", ScheduleConfig)
    monkeypatch.setitem(BUILDERS["schedule"], "own", own)
    with pytest.raises(CodeError, match=f"the schedule own.* {error}"):
        check_schedule(schedule("own"), run_steps=1000)
        get_lr(6, schedule("own"), 1000)
