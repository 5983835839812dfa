"""The flags and losses that the ranks exchange in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt_ddp.training.step_flags import StepFlags, send_flags

QUIET = [0.0, 0.0, 0.0, 0.0, 0.0]  # interrupted, saving, a save is due, loss, steps


class Gathering:
    """A process group whose other ranks send these rows, after or before this rank's row."""

    def __init__(self, *others: list[float], is_rank_zero: bool = True) -> None:
        self.others = others
        self.is_rank_zero = is_rank_zero

    def all_gather_async(self, row: Tensor) -> Any:
        others = [torch.cat([torch.tensor(other), row[-1:]]) for other in self.others]
        rows = [row, *others] if self.is_rank_zero else [*others, row]
        return lambda: torch.stack(rows)


def flags_of(row: list[float]) -> StepFlags:
    return StepFlags(bool(row[0]), bool(row[1]), bool(row[2]), row[3], int(row[4]))


@pytest.mark.parametrize(
    ("own", "others", "received"),
    [
        (QUIET, [], QUIET),
        # A flag of any rank counts, and the losses are added up.
        (QUIET, [QUIET, [1, 0, 0, 0, 0]], [1, 0, 0, 0, 0]),
        (QUIET, [QUIET, [0, 1, 0, 0, 0]], [0, 1, 0, 0, 0]),
        ([1, 1, 0, 0, 0], [QUIET], [1, 1, 0, 0, 0]),
        ([0, 0, 0, 1.0, 0], [[0, 0, 0, 2.0, 0], [0, 0, 0, 4.0, 0]], [0, 0, 0, 7.0, 0]),
    ],
)
@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_a_flag_of_any_rank_counts_and_the_losses_add_up(own, others, received, is_rank_zero):
    group = Gathering(*others, is_rank_zero=is_rank_zero)
    assert send_flags(flags_of(own), ["loss"], group)() == flags_of(received)


@pytest.mark.parametrize(("is_rank_zero", "decides"), [(True, 0), (False, 1)])
def test_only_rank_zeros_clock_decides_if_a_save_is_due_and_how_many_steps(is_rank_zero, decides):
    own, other = [0, 0, 1, 0, 70], [0, 0, 0, 0, 60]
    received = send_flags(flags_of(own), (), Gathering(other, is_rank_zero=is_rank_zero))()
    assert received == flags_of((own, other)[decides])
