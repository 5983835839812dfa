"""What a step exchanges with the other ranks, and when it reads the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt_ddp.training.step_control import RunControl, StepControl, StepFlags

QUIET = [0.0, 0.0, 0.0, 0.0]  # interrupted, saving, a save is due, loss


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
        self.is_waiting = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.is_waiting = True
        yield
        self.is_waiting = False

    def all_gather_async(self, row: Tensor) -> Any:
        self.sent.append(row)
        others = [torch.tensor(other, dtype=torch.float64) for other in self.others]
        rows = [row, *others] if self.is_rank_zero else [*others, row]
        return lambda: torch.stack(rows)


def control_of(
    group: Gathering,
    signal: str | None = None,
    saving: bool = False,
    is_due: bool = False,
    checks: bool = True,
) -> RunControl:
    context = SimpleNamespace(
        interrupt=SimpleNamespace(signal_name=signal),
        runtime=SimpleNamespace(group=group),
        metrics=SimpleNamespace(
            norms=SimpleNamespace(measure=lambda *values: values), log_values="log values"
        ),
    )
    saves = SimpleNamespace(
        manager=SimpleNamespace(save_in_progress=saving),
        is_due=lambda: is_due,
        wait_for_staging=lambda: group.sent.append("waited"),
    )
    anomaly = SimpleNamespace(
        checks_every_step=checks, find_anomaly=lambda *values: f"found in {values}"
    )
    return RunControl(context, saves, anomaly)


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({}, [0, 0, 0, 2.5]),
        ({"signal": "SIGTERM"}, [1, 0, 0, 2.5]),
        ({"saving": True}, [0, 1, 0, 2.5]),
        ({"is_due": True}, [0, 0, 1, 2.5]),
    ],
)
def test_a_rank_sends_its_own_flags_and_its_share_of_the_loss(settings, row):
    group = Gathering()
    flags = control_of(group, **settings).send_flags(torch.tensor(2.5))()
    assert group.sent[0].tolist() == row
    assert group.sent[0].dtype == torch.float64
    assert flags == StepFlags(bool(row[0]), bool(row[1]), bool(row[2]), 2.5)


def test_the_loss_is_read_only_if_every_step_is_checked():
    group = Gathering([0, 0, 0, 0.0])
    control = control_of(group, checks=False)
    flags = control.send_flags(Unreadable())()
    assert group.sent[0].tolist() == QUIET
    assert flags == StepFlags()
    assert control.find_anomaly(flags, Unreadable()) is None
    with pytest.raises(AssertionError, match="the loss was read"):
        control_of(group).send_flags(Unreadable())


def test_the_policy_gets_the_loss_of_all_ranks_and_the_norm():
    group = Gathering()
    control = control_of(group)

    class Norm:
        """A tensor on a GPU, whose queue may hold collectives."""

        def __float__(self) -> float:
            assert group.is_waiting, "the watchdog would blame this rank"
            return 0.5

    assert control.find_anomaly(StepFlags(loss=2.5), Norm()) == "found in (2.5, 0.5)"
    assert not group.is_waiting


@pytest.mark.parametrize(
    ("others", "flags"),
    [
        ([QUIET, QUIET], StepFlags(loss=1.0)),
        ([QUIET, [1, 0, 0, 0]], StepFlags(interrupted=True, loss=1.0)),
        ([QUIET, [0, 1, 0, 0]], StepFlags(saving=True, loss=1.0)),
        ([[0, 0, 0, 2.0], [0, 0, 0, 4.0]], StepFlags(loss=7.0)),
    ],
)
def test_a_flag_of_any_rank_counts_and_the_losses_add_up(others, flags):
    for is_rank_zero in (True, False):
        group = Gathering(*others, is_rank_zero=is_rank_zero)
        assert control_of(group).send_flags(torch.tensor(1.0))() == flags


def test_rank_zeros_clock_alone_decides_whether_a_save_is_due():
    due = [0.0, 0.0, 1.0, 0.0]
    for is_rank_zero in (True, False):
        early = control_of(Gathering(due, due, is_rank_zero=is_rank_zero))
        late = control_of(Gathering(QUIET, QUIET, is_rank_zero=is_rank_zero), is_due=True)
        assert early.send_flags(torch.tensor(0.0))().save_is_due is not is_rank_zero
        assert late.send_flags(torch.tensor(0.0))().save_is_due is is_rank_zero


def test_the_flags_are_received_when_they_are_asked_for():
    """The step clips its gradients meanwhile."""
    group = Gathering()
    received: list[str] = []

    def receive() -> Tensor:
        received.append("table")
        return torch.zeros(1, 4)

    group.all_gather_async = lambda row: receive
    wait = control_of(group).send_flags(torch.tensor(0.0))
    assert not received
    wait()
    assert received == ["table"]


def test_a_run_waits_for_staging_and_measures_its_norms():
    group = Gathering()
    control = control_of(group)
    control.wait_for_staging()
    assert group.sent == ["waited"]
    assert control.measure_norms(3) == (3, "log values")


def test_a_step_on_its_own_has_nothing_to_wait_for():
    control = StepControl()
    control.wait_for_staging()
    assert control.send_flags(Unreadable())() == StepFlags(False, False, False, 0.0)
    assert control.find_anomaly(StepFlags(loss=float("nan")), torch.tensor(1.0)) is None
    with control.measure_norms(1) as measured:
        assert measured is None
