"""When a rank is called slow, and when not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.metrics.stragglers import Stragglers


class Group:
    """A rank among others, whose rows are given."""

    def __init__(self, others: list[tuple[float, float]]) -> None:
        self.others, self.world_size = others, len(others) + 1

    def all_gather_async(self, row: torch.Tensor):
        return lambda: torch.tensor([row.tolist(), *self.others], dtype=torch.float64)


def feed(works: list[float], every: int = 5, data_ms: float = 0.0) -> Stragglers:
    """Let rank 0 work for these times in ms, an interval each, besides two ranks with 10 ms."""
    stragglers = Stragglers(Group([(10.0, 0.0), (10.0, 0.0)]), 0)
    for i, work in enumerate(works, start=1):
        stragglers.check(i * every, work, data_ms, 1)
    stragglers.log_end()
    return stragglers


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([10, 10, 18, 18, 18], ["rank 0 is slow: 1.8x the median step since step 11 (compute)"]),
        ([10, 18, 10, 18, 10], []),
        ([12, 12, 12, 12], []),
        ([10, 20, 20, 10], ["rank 0 is slow: 2.0x the median step since step 6 (compute)"]),
    ],
)
def test_a_rank_is_slow_if_it_stays_slow(works, expected, log_lines):
    feed(works)
    assert [line.removeprefix("WARNING ") for line in log_lines if "is slow" in line] == expected
    assert ("INFO rank 0 is no longer slow since step 16" in log_lines) == (
        works == [10, 20, 20, 10]
    )


def test_two_slow_steps_are_no_verdict(log_lines):
    feed([20, 20], every=1)
    assert not log_lines


def test_the_end_sums_up(log_lines):
    feed([10, 15, 25])
    assert log_lines[-1] == (
        "INFO rank 0 was slow in 10 steps, 2.0x the median step on average, and still is "
        "since step 6"
    )


def test_the_cause(log_lines):
    feed([18, 18], every=10, data_ms=7.0)
    assert "(data wait)" in log_lines[0]


def test_steps_after_a_rollback_are_not_judged(log_lines):
    stragglers = Stragglers(Group([(10.0, 0.0)]), 100)
    assert stragglers.check(90, 30.0, 0.0, 1) == {}
    assert stragglers.check(100, 30.0, 0.0, 1) == {
        "speed/slowest_rank": 0.0,
        "speed/slowest_ratio": 3.0,
    }


def test_work_that_was_not_measured_gives_no_verdict():
    assert Stragglers(Group([(10.0, 0.0)]), 0).check(10, 0.0, 0.0, 1) == {}


def test_one_rank_has_no_others():
    assert Stragglers(SimpleNamespace(world_size=1), 0).check(10, 5.0, 1.0, 1) == {}
