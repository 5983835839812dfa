"""What the strategies communicate in a step, that the observers see faults, and what torch lacks.

The reasons of the waits that are allowed are in expected.py.
"""

from __future__ import annotations

import math

import pytest

from fake_gpu.cases import BLOCK, LAYERS, VOCABULARY, WIDTH, Case
from fake_gpu.checks import collectives_per_step, differences, job_of
from fake_gpu.expected import waits_of
from fake_gpu.mutants import MUTANTS
from fake_gpu.process import job, result_of
from fake_gpu.strategies import STRATEGIES

MATRICES = 12 * LAYERS * WIDTH**2  # qkv, proj, up, down
VECTORS = (2 * LAYERS + 1) * WIDTH  # the gains of the norms
PARAMETERS = (VOCABULARY + BLOCK) * WIDTH + MATRICES + VECTORS
MISSING = {
    "fused SGD": (job_of(Case(optimizer="sgd")), "_fused_sgd_"),
    "DataParallel": (job("dataparallel_step"), "_scatter"),
    "SyncBatchNorm": (job("synchronized_batchnorm"), "batch_norm"),
}


def each(cases):
    return [pytest.param(name, job_of(case), id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("name", "run"), each(STRATEGIES))
def test_collectives_of_a_strategy(name, run, answer_of):
    case = STRATEGIES[name]
    result = result_of(answer_of(run))
    assert sum(map(math.prod, result["shapes"].values())) == PARAMETERS
    found = differences(case, result)
    assert not found, "\n".join(found)
    sent = sum(size for _, size in collectives_per_step(result).values())
    tensors = len(result["shapes"])
    by_hand = {
        "ddp": 4 * PARAMETERS,
        "zero1": (4 + 4) * PARAMETERS,
        # bf16 weights twice, fp32 gradients once; each dimension divides by 8; and the norms
        "fsdp": (2 + 2 + 4) * PARAMETERS + 4 * tensors,
        # and each rank the quarter that it holds with the other replica
        "hsdp": (2 + 2 + 4 + 1) * PARAMETERS + 4 * tensors,
        "ddp, Muon": 4 * PARAMETERS + 2 * 8 * MATRICES // LAYERS,  # two matrices on eight ranks
    }
    if name in by_hand:
        assert sent == by_hand[name]


@pytest.mark.parametrize(
    ("name", "run"), [pytest.param(n, job("run_mutant", name=n), id=n) for n in MUTANTS]
)
def test_a_fault_is_found(name, run, answer_of):
    mutant = MUTANTS[name]
    answer = answer_of(run)
    if "error" in answer:
        assert mutant.found in answer["error"]
        return
    found = differences(mutant.case, answer["result"])
    assert any(line.startswith(mutant.phase) and mutant.found in line for line in found), found


@pytest.mark.parametrize(
    ("run", "what"), [pytest.param(*of, id=name) for name, of in MISSING.items()]
)
def test_torch_has_no_fake_kernel(run, what, answer_of):
    """Once it has one, let the cases use it."""
    assert what in answer_of(run)["error"]


def test_each_allowed_wait_has_a_reason():
    waits = waits_of(Case(skip=True, norms=True), {"head.weight": [4, 4]})
    assert len({wait.reason for wait in waits}) == len(waits)
