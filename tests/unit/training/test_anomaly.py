"""When the anomaly policy rejects a step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.training.anomaly import EMA_DECAY, AnomalyPolicy
from mingpt_ddp.training.train_state import TrainState


def policy(
    state: TrainState | None = None, spike_factor: float | None = None, scaled: bool = False
) -> AnomalyPolicy:
    trainer = SimpleNamespace(spike_factor=spike_factor, on_nonfinite="stop")
    scaler = SimpleNamespace(is_enabled=lambda: scaled)
    runtime = SimpleNamespace(scaler=scaler, device=torch.device("cpu"))
    config = SimpleNamespace(trainer=trainer)
    return AnomalyPolicy(
        SimpleNamespace(config=config, runtime=runtime, state=state or TrainState())
    )


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_nonfinite_loss_or_norm(loss, norm):
    assert policy().find_anomaly(loss, norm) == f"loss {loss} and gradient norm {norm}"


def test_large_finite_values():
    assert policy().find_anomaly(1e30, 1e30) is None


def test_an_overflow_of_scaled_gradients_is_not_an_anomaly():
    """But a loss is never scaled."""
    assert policy(scaled=True).find_anomaly(1.0, math.inf) is None
    assert policy(scaled=True).find_anomaly(1.0, math.nan) is None
    assert policy(scaled=True).find_anomaly(math.nan, 1.0) is not None


def test_a_loss_spike():
    anomaly_policy = policy(spike_factor=2)
    assert anomaly_policy.find_anomaly(1e9, 1.0) is None, "there is no average to compare with yet"
    anomaly_policy.on_step_accepted(1, 3.0)
    assert anomaly_policy.run.state.loss_ema == 3.0
    assert anomaly_policy.find_anomaly(6.0, 1.0) is None
    assert (
        anomaly_policy.find_anomaly(6.001, 1.0)
        == "loss 6.0010, more than 2 times the average of 3.0000"
    )


def test_the_average_decays():
    state = TrainState()
    anomaly_policy = policy(state, spike_factor=2)
    anomaly_policy.on_step_accepted(1, 3.0)
    anomaly_policy.on_step_accepted(2, 1.0)
    assert state.loss_ema == pytest.approx(3 * EMA_DECAY + 1 - EMA_DECAY)
    for step in range(3, 1000):
        anomaly_policy.on_step_accepted(step, 1.0)
    assert state.loss_ema == pytest.approx(1.0)


def test_without_a_factor_there_is_no_average():
    """Snapshots without the option do not change."""
    state = TrainState()
    policy(state).on_step_accepted(1, 3.0)
    assert state.loss_ema is None


@pytest.mark.parametrize(("step", "skips"), [(8, 3), (10, 0)])
def test_an_accepted_step_resets_the_count_of_skips(step, skips):
    """Not one that is repeated after a rollback."""
    state = TrainState(consecutive_skips=3, skipped_steps=[7, 9])
    policy(state).on_step_accepted(step, 1.0)
    assert state.consecutive_skips == skips
