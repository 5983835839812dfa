"""Every pair of values takes two steps, logs, stages a snapshot, evaluates and samples.

One case alone: `pytest tests/fake_gpu/test_pairs.py -k fsdp-on-256`.
"""

from __future__ import annotations

import pytest

from fake_gpu.cases import pairwise
from fake_gpu.checks import differences, job_of
from fake_gpu.process import result_of


@pytest.mark.parametrize(
    ("case", "run"), [pytest.param(case, job_of(case), id=str(case)) for case in pairwise()]
)
def test_waits_and_collectives(case, run, answer_of):
    found = differences(case, result_of(answer_of(run)))
    assert not found, "\n".join([str(case), *found])
