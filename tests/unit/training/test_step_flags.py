"""What the ranks exchange in a step, and when the loss is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt_ddp.errors import TrainingError
from mingpt_ddp.training.step_flags import StepFlags, send_flags
from mingpt_ddp.training.trainer import Trainer

QUIET = [0.0, 0.0, 0.0, 0.0, 0.0]  # interrupted, saving, a save is due, loss, steps


class Unreadable:
    """A loss on a GPU, which must not be waited for."""

    def __float__(self) -> float:
        raise AssertionError("the loss was read")


class Gathering:
    """A process group whose other ranks send these rows after this one's, or before it."""

    def __init__(self, *others: list[float], is_rank_zero: bool = True) -> None:
        self.others = others
        self.is_rank_zero = is_rank_zero
        self.sent: list[Tensor] = []

    def all_gather_async(self, row: Tensor) -> Any:
        self.sent.append(row)
        others = [torch.cat([torch.tensor(other), row[-1:]]) for other in self.others]
        rows = [row, *others] if self.is_rank_zero else [*others, row]
        return lambda: torch.stack(rows)


def trainer_of(
    group: Gathering,
    signal: str | None = None,
    saving: bool = False,
    is_due: bool = False,
    checks: bool = True,
    steps: int = 0,
) -> Trainer:
    """Return a trainer of which only the flags can be sent."""
    trainer = object.__new__(Trainer)
    trainer.observers = SimpleNamespace(signals=SimpleNamespace(signal_name=signal))
    trainer.runtime = SimpleNamespace(group=group)
    trainer.saves = SimpleNamespace(
        manager=SimpleNamespace(save_in_progress=saving), is_due=lambda: is_due
    )
    trainer.anomaly = SimpleNamespace(checks_every_step=checks)
    trainer.timer = SimpleNamespace(take=lambda step: steps)
    return trainer


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({}, [0, 0, 0, 2.5, 0]),
        ({"signal": "SIGTERM"}, [1, 0, 0, 2.5, 0]),
        ({"saving": True}, [0, 1, 0, 2.5, 0]),
        ({"is_due": True}, [0, 0, 1, 2.5, 0]),
        ({"steps": 70}, [0, 0, 0, 2.5, 70]),
    ],
)
def test_a_rank_sends_its_own_flags_and_its_share_of_the_loss(settings, row):
    group = Gathering()
    flags = trainer_of(group, **settings)._send_flags(7, {"loss": torch.tensor(2.5)})()
    assert group.sent[0].tolist()[:-1] == row
    assert group.sent[0].dtype == torch.float64
    assert flags == StepFlags(bool(row[0]), bool(row[1]), bool(row[2]), 2.5, row[4])


def test_the_loss_is_read_only_if_every_step_is_checked():
    group = Gathering(QUIET)
    flags = trainer_of(group, checks=False)._send_flags(7, {"loss": Unreadable()})()
    assert group.sent[0].tolist()[:-1] == QUIET
    assert flags == StepFlags()
    with pytest.raises(AssertionError, match="the loss was read"):
        trainer_of(group)._send_flags(7, {"loss": Unreadable()})


@pytest.mark.parametrize(
    ("others", "flags"),
    [
        ([QUIET, QUIET], StepFlags(loss=1.0)),
        ([QUIET, [1, 0, 0, 0, 0]], StepFlags(interrupted=True, loss=1.0)),
        ([QUIET, [0, 1, 0, 0, 0]], StepFlags(saving=True, loss=1.0)),
        ([[0, 0, 0, 2.0, 0], [0, 0, 0, 4.0, 0]], StepFlags(loss=7.0)),
    ],
)
def test_a_flag_of_any_rank_counts_and_the_losses_add_up(others, flags):
    for is_rank_zero in (True, False):
        group = Gathering(*others, is_rank_zero=is_rank_zero)
        assert send_flags(StepFlags(loss=1.0), (), group)() == flags


def test_rank_zeros_clock_alone_decides_whether_a_save_is_due_and_how_many_steps():
    due = [0.0, 0.0, 1.0, 0.0, 60.0]
    for is_rank_zero in (True, False):
        early = send_flags(StepFlags(), (), Gathering(due, due, is_rank_zero=is_rank_zero))
        others = Gathering(QUIET, QUIET, is_rank_zero=is_rank_zero)
        late = send_flags(StepFlags(save_is_due=True, steps=70), (), others)
        assert early() == (StepFlags() if is_rank_zero else StepFlags(save_is_due=True, steps=60))
        assert late() == (StepFlags(save_is_due=True, steps=70) if is_rank_zero else StepFlags())


def test_the_flags_are_received_when_they_are_asked_for():
    """The loop clips the gradients meanwhile."""
    group = Gathering()
    received: list[str] = []

    def receive() -> Tensor:
        received.append("table")
        return torch.zeros(1, 6)

    group.all_gather_async = lambda row: receive
    wait = send_flags(StepFlags(), (), group)
    assert not received
    wait()
    assert received == ["table"]


def test_ranks_with_other_names_are_refused():
    """All of them, with one line, before a metric is averaged."""
    group = Gathering()
    group.all_gather_async = lambda row: lambda: torch.stack([row, torch.zeros(6)])
    group.all_gather = lambda names: [["loss"], ["loss", "sum/entropy"]]
    with pytest.raises(TrainingError, match=r"rank 1 has other losses or metrics .*: sum/entropy;"):
        send_flags(StepFlags(), ["loss"], group)()
