"""The anomaly policy rejects steps with non-finite numbers or a spike of the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from tasks import text_task

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.training.anomaly import LOSS_EMA_DECAY, AnomalyPolicy
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.trainable import Run

CONFIG = from_mapping(configure("model=gpt_nano", "trainer.device=cpu"))


def policy(
    state: TrainState | None = None, spike_factor: float | None = None, scaled: bool = False
) -> AnomalyPolicy:
    """Return the policy of a run. The other parts of the run are left out."""
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, spike_factor=spike_factor))
    runtime = Runtime(config, DistEnv())
    runtime.scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    none: Any = None
    length = RunLength(config, 10, state or TrainState())
    task = text_task(config)
    return AnomalyPolicy(
        Run(runtime, task, none, Path("run"), none, length, none, {}, {}, is_complete=False)
    )


@pytest.mark.parametrize(
    ("loss", "norm", "scaled", "found"),
    [
        (math.nan, 1.0, False, "loss nan and gradient norm 1.0"),
        (-math.inf, 1.0, False, "loss -inf and gradient norm 1.0"),
        (1.0, math.nan, False, "loss 1.0 and gradient norm nan"),
        (1e30, 1e30, False, None),
        # An overflow of scaled gradients is not an anomaly. A loss is never scaled.
        (1.0, math.inf, True, None),
        (math.nan, 1.0, True, "loss nan and gradient norm 1.0"),
    ],
)
def test_which_steps_are_anomalies(loss, norm, scaled, found):
    assert policy(scaled=scaled).find_anomaly(loss, norm) == found


def test_a_spike_is_above_the_decaying_average():
    """Without trainer.spike_factor there is no average, and snapshots have no such entry."""
    spikes = policy(spike_factor=2)
    assert spikes.find_anomaly(1e9, 1.0) is None, "there is no average to compare with yet"
    spikes.on_step_accepted(1, 3.0)
    assert spikes.find_anomaly(6.0, 1.0) is None
    message = "loss 6.0010, more than 2 times the average of 3.0000"
    assert spikes.find_anomaly(6.001, 1.0) == message
    spikes.on_step_accepted(2, 1.0)
    assert spikes.run.state.loss_ema == pytest.approx(3 * LOSS_EMA_DECAY + 1 - LOSS_EMA_DECAY)
    without = policy()
    without.on_step_accepted(1, 3.0)
    assert without.run.state.loss_ema is None


@pytest.mark.parametrize(("step", "skips"), [(8, 3), (10, 0)])
def test_an_accepted_step_resets_the_count_of_skips(step, skips):
    """A step that is repeated after a rollback does not reset it."""
    state = TrainState(consecutive_skips=3, skipped_steps=[7, 9])
    policy(state).on_step_accepted(step, 1.0)
    assert state.consecutive_skips == skips
