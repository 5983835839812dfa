"""What the strategies communicate in a step, that the observers see faults, and what torch lacks.

The reasons of the waits that are allowed are in expected.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from multiprocess.ranks import configure

from fake_gpu.cases import BLOCK, LAYERS, VOCABULARY, WIDTH, Case
from fake_gpu.checks import collectives_per_step, differences, job_of
from fake_gpu.expected import waits_of
from fake_gpu.mutants import MUTANTS
from fake_gpu.process import job, result_of
from fake_gpu.strategies import RANKS, STRATEGIES
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.metrics.gpus import Machine
from mingpt_ddp.planning.gpu_plan import make_gpu_plan

MATRICES = 12 * LAYERS * WIDTH**2  # qkv, proj, up, down
VECTORS = (2 * LAYERS + 1) * WIDTH  # the gains of the norms
PARAMETERS = (VOCABULARY + BLOCK) * WIDTH + MATRICES + VECTORS
MISSING = {
    "fused SGD": (job_of(Case(optimizer="sgd")), "_fused_sgd_"),
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


def sent_by_a_rank(kind: str, size: int) -> float:
    """Return the bytes that a rank sends in a ring: twice in an all-reduce.

    Args:
        kind: such as `all_gather of 8`.
        size: of the whole messages.
    """
    name, _, ranks = kind.partition(" of ")
    return (2 if name == "all_reduce" else 1) * size * (int(ranks) - 1) / int(ranks)


@pytest.mark.parametrize(("name", "run"), each(STRATEGIES))
def test_the_planned_bytes_on_the_wire_are_those_of_the_fake_gpu(name, run, answer_of, text):
    case = STRATEGIES[name]
    sent = collectives_per_step(result_of(answer_of(run)))
    found = sum(sent_by_a_rank(kind, size) for kind, (_, size) in sent.items())
    words = [f"data.path={text}", f"data.cache_dir={text.parent}", f"ddp.nproc_per_node={RANKS}"]
    config = from_mapping(configure(*case.overrides(), "trainer.device=auto", *words))
    plan = make_gpu_plan(config, Machine("h100"), outputs=VOCABULARY)
    strategy = "tensor_parallel" if case.strategy == "tensor" else case.strategy
    planned = plan["gpu"]["strategies"][strategy]["wire_bytes_per_step"]
    # the norms of the gradients are not planned
    assert planned == pytest.approx(found, rel=1e-3)
    assert planned <= found


EVERYTHING = [
    "optimizer=muon",
    "trainer.precision=fp16",
    "trainer.activation_checkpointing=true",
    "trainer.ema=0.99",
    "trainer.on_nonfinite=skip",
]


def example(ranks: int, rank: int, overrides: list[str]) -> dict[str, Any]:
    """Return the job of a rank that trains the example model on all GPUs of a node."""
    words = [f"data.block_size={BLOCK}", "trainer.batch_size=16", "trainer.micro_batch_size=2"]
    return job("several_gpus", ranks=ranks, rank=rank, overrides=[*words, *overrides])


@pytest.mark.parametrize(
    ("run", "gpus"),
    [
        pytest.param(example(2, 1, []), [1, 3, 5, 7], id="two ranks"),
        pytest.param(example(4, 2, EVERYTHING), [2, 6], id="four ranks, everything"),
        pytest.param(example(1, 0, EVERYTHING), range(8), id="one rank"),
        pytest.param(example(8, 7, []), [7], id="eight ranks"),
    ],
)
def test_a_model_that_places_itself(run, gpus, answer_of):
    """Operations on tensors of two GPUs, and tensors elsewhere, are errors."""
    result = result_of(answer_of(run))
    last = len(gpus) - 1
    expected = {"token_embedding.weight": gpus[0], "head.1.weight": gpus[last]}
    for block in range(4):
        expected[f"blocks.{block}.qkv.weight"] = gpus[block * len(gpus) // 4]
    assert {name: result["gpus"][name] for name in expected} == expected
    used = {*result["gpus"].values()}
    rank, ranks = run["arguments"]["rank"], run["arguments"]["ranks"]
    streams = len(used) if rank == 0 else 1  # rank zero writes all
    waits = {"wait for a stream in snapshots/write/async_writer.py _stage": streams}
    assert result["waits"]["stage"] == waits
    if ranks > 1:
        sent = collectives_per_step(result)[f"all_reduce of {ranks}"]
        assert sent == [len(used), 4 * sum(result["sizes"].values())]  # a bucket for each GPU


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
    waits = waits_of(Case(skip=True), {"head.weight": [4, 4]})
    assert len({wait.reason for wait in waits}) == len(waits)
