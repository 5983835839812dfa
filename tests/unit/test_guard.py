"""When a step must not be taken."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.snapshots.train_state import Position
from mingpt_ddp.training.anomaly import MEMORY, PATIENCE, Guard


def guard(spike_factor: float | None = None, scaled: bool = False) -> Guard:
    trainer = SimpleNamespace(spike_factor=spike_factor, on_nonfinite="stop")
    return Guard(SimpleNamespace(trainer=trainer), scaled, torch.device("cpu"))


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite(loss, norm):
    assert guard().complaint(loss, norm, Position()) == f"loss {loss} and gradient norm {norm}"


def test_what_is_finite():
    assert guard().complaint(1e30, 1e30, Position()) is None


def test_an_overflow_of_scaled_gradients_is_no_sickness():
    """But a loss is never scaled."""
    assert guard(scaled=True).complaint(1.0, math.inf, Position()) is None
    assert guard(scaled=True).complaint(1.0, math.nan, Position()) is None
    assert guard(scaled=True).complaint(math.nan, 1.0, Position()) is not None


def test_a_spike():
    judge, position = guard(spike_factor=2), Position()
    assert judge.complaint(1e9, 1.0, position) is None, "there is nothing to compare with yet"
    judge.healthy(1, 3.0, position)
    assert position.loss_average == 3.0
    assert judge.complaint(6.0, 1.0, position) is None
    assert judge.complaint(6.001, 1.0, position) == "loss 6.0010, more than 2 times the average of 3.0000"


def test_the_average_forgets():
    judge, position = guard(spike_factor=2), Position()
    judge.healthy(1, 3.0, position)
    judge.healthy(2, 1.0, position)
    assert position.loss_average == pytest.approx(3 * MEMORY + 1 - MEMORY)
    for step in range(3, 1000):
        judge.healthy(step, 1.0, position)
    assert position.loss_average == pytest.approx(1.0)


def test_without_a_factor_there_is_no_average():
    """A snapshot does not change because nobody asked for something."""
    position = Position()
    guard().healthy(1, 3.0, position)
    assert position.loss_average is None


def test_patience():
    position = Position()
    for count in range(1, PATIENCE + 1):
        position.sick_in_a_row = count
        assert not Guard.exhausted(position)
    position.sick_in_a_row += 1
    assert Guard.exhausted(position)
    guard().healthy(99, 1.0, position)
    assert position.sick_in_a_row == 0


def test_steps_that_are_repeated_after_going_back_are_no_recovery():
    position = Position(sick_in_a_row=3, passed_over=[7, 9])
    guard().healthy(8, 1.0, position)
    assert position.sick_in_a_row == 3
    guard().healthy(10, 1.0, position)
    assert position.sick_in_a_row == 0
