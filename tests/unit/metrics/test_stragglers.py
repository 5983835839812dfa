"""The slowest rank, and how much slower it is than the median."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.metrics.stragglers import slowest_rank


@pytest.mark.parametrize(
    ("work_ms", "micro_batches", "others", "expected"),
    [
        (18.0, 1, [10.0, 10.0], (0, 1.8)),
        (10.0, 1, [10.0, 25.0], (2, 2.5)),
        (10.0, 1, [12.0, 10.0, 30.0], (3, 3.0)),  # relative to the median
        (20.0, 2, [11.0], (1, 1.1)),  # a rank with more micro-batches is not slow
        (0.0, 1, [0.0], None),  # no time was measured
        (0.0, 1, [10.0], None),
        (10.0, 1, [], None),  # a single rank
    ],
)
def test_the_slowest_rank(work_ms, micro_batches, others, expected):
    """The other ranks have one micro-batch each."""
    rows = [[work] for work in others]
    group = SimpleNamespace(
        world_size=1 + len(others),
        all_gather_async=lambda row: lambda: torch.tensor([row.tolist(), *rows]),
    )
    found = slowest_rank(group, work_ms, micro_batches)
    if expected is None:
        assert found == {}
    else:
        rank, ratio = expected
        assert found == {
            "speed/slowest_rank": rank,
            "speed/slowest_ratio": pytest.approx(ratio),
        }
