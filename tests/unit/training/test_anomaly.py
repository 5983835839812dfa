"""When a step must not be taken."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.snapshots.train_state import TrainState
from mingpt_ddp.training.anomaly import EMA_DECAY, MAX_CONSECUTIVE_SKIPS, AnomalyPolicy


def anomaly(spike_factor: float | None = None, scaled: bool = False) -> AnomalyPolicy:
    trainer = SimpleNamespace(spike_factor=spike_factor, on_nonfinite="stop")
    return AnomalyPolicy(SimpleNamespace(trainer=trainer), scaled, torch.device("cpu"))


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite(loss, norm):
    assert anomaly().find_anomaly(loss, norm, TrainState()) == f"loss {loss} and gradient norm {norm}"


def test_what_is_finite():
    assert anomaly().find_anomaly(1e30, 1e30, TrainState()) is None


def test_an_overflow_of_scaled_gradients_is_no_sickness():
    """But a loss is never scaled."""
    assert anomaly(scaled=True).find_anomaly(1.0, math.inf, TrainState()) is None
    assert anomaly(scaled=True).find_anomaly(1.0, math.nan, TrainState()) is None
    assert anomaly(scaled=True).find_anomaly(math.nan, 1.0, TrainState()) is not None


def test_a_spike():
    judge, position = anomaly(spike_factor=2), TrainState()
    assert judge.find_anomaly(1e9, 1.0, position) is None, "there is nothing to compare with yet"
    judge.on_step_accepted(1, 3.0, position)
    assert position.loss_ema == 3.0
    assert judge.find_anomaly(6.0, 1.0, position) is None
    assert judge.find_anomaly(6.001, 1.0, position) == "loss 6.0010, more than 2 times the average of 3.0000"


def test_the_average_forgets():
    judge, position = anomaly(spike_factor=2), TrainState()
    judge.on_step_accepted(1, 3.0, position)
    judge.on_step_accepted(2, 1.0, position)
    assert position.loss_ema == pytest.approx(3 * EMA_DECAY + 1 - EMA_DECAY)
    for step in range(3, 1000):
        judge.on_step_accepted(step, 1.0, position)
    assert position.loss_ema == pytest.approx(1.0)


def test_without_a_factor_there_is_no_average():
    """A snapshot does not change because nobody asked for something."""
    position = TrainState()
    anomaly().on_step_accepted(1, 3.0, position)
    assert position.loss_ema is None


def test_patience():
    position = TrainState()
    for count in range(1, MAX_CONSECUTIVE_SKIPS + 1):
        position.consecutive_skips = count
        assert not AnomalyPolicy.too_many_skips(position)
    position.consecutive_skips += 1
    assert AnomalyPolicy.too_many_skips(position)
    anomaly().on_step_accepted(99, 1.0, position)
    assert position.consecutive_skips == 0


def test_steps_that_are_repeated_after_going_back_are_no_recovery():
    position = TrainState(consecutive_skips=3, skipped_steps=[7, 9])
    anomaly().on_step_accepted(8, 1.0, position)
    assert position.consecutive_skips == 3
    anomaly().on_step_accepted(10, 1.0, position)
    assert position.consecutive_skips == 0
