"""The plan for a GPU that is not here agrees with the step on the fake one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multiprocess.ranks import configure

from fake_gpu.process import job, result_of
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.metrics.gpus import Machine
from mingpt_ddp.planning.gpu_plan import make_gpu_plan

VOCABULARY = 50257
MICRO = 4
GPUS = 8  # of a node
MODEL = [
    *("model=gpt2", "model.n_layer=2", "data.block_size=1024", "trainer.precision=bf16"),
    f"trainer.micro_batch_size={MICRO}",
]
PARAMETERS = VOCABULARY * 768 + 1024 * 768 + 2 * (12 * 768**2 + 13 * 768) + 2 * 768
EMBEDDING = VOCABULARY * 768  # largest, so rank zero owns it, and nothing else
SLACK = 1 << 20  # tensors are rounded up, and more ranks have a longer text
TOLERANCE = 0.002  # blocks of the allocator are not planned, and small tensors of DTensor

# name: overrides, ranks, micro-batches of a rank
RUNS: dict[str, tuple[list[str], int, int]] = {
    "single": ([], 1, 1),
    "single, fp32": (["trainer.precision=fp32"], 1, 1),
    "single, recomputed": (["trainer.activation_checkpointing=true"], 1, 1),
    "single, 3 micro-batches": ([], 1, 3),
    "single, average": (["trainer.ema=0.999"], 1, 1),
    "single, muon": (["optimizer=muon"], 1, 1),
    "single, modern": (["model=modern_mini", "model.n_layer=2"], 1, 1),
    "ddp on 8": (["ddp.strategy=ddp"], 8, 1),
    "zero1 on 8": (["ddp.strategy=zero1"], 8, 1),
    "fsdp on 8": (["ddp.strategy=fsdp"], 8, 1),
    "fsdp on 64": (["ddp.strategy=fsdp"], 64, 1),
    "fsdp on 8, 3 micro-batches": (["ddp.strategy=fsdp"], 8, 3),
    "hsdp on 64": (["ddp.strategy=hsdp"], 64, 1),
    "tensor_parallel on 8": (["ddp.tensor_parallel=4", "model.dropout=0"], 8, 1),
}

# Where the loss is small, other moments need most: the backward pass of the last block, the end of
# the backward pass, a message, the update.
CHARACTERS = 65
CHARACTER_MODEL = [
    *("model=gpt_mini", "data.block_size=256", "trainer.precision=bf16"),
    f"trainer.micro_batch_size={MICRO}",
]
WIDE = ["model.n_embd=1024", "model.n_head=16", "data.block_size=64"]
ROUGH = 0.05  # tolerance
RUNS_OF_CHARACTERS: dict[str, tuple[list[str], int, int]] = {
    "single, block": ([], 1, 1),
    "single, block, fp32": (["trainer.precision=fp32"], 1, 1),
    "single, block, recomputed": (["trainer.activation_checkpointing=true"], 1, 1),
    "single, block, modern": (["model=modern_mini", "model.dropout=0.1"], 1, 1),
    "fsdp on 8, block, modern, recomputed": (
        ["model=modern_mini", "ddp.strategy=fsdp", "trainer.activation_checkpointing=true"],
        8,
        1,
    ),
    "single, forward, recomputed": ([*WIDE, "trainer.activation_checkpointing=true"], 1, 3),
    "single, end": (WIDE, 1, 1),
    "ddp on 8, 3 micro-batches": ([*WIDE, "ddp.strategy=ddp"], 8, 3),
    "zero1 on 8, block": ([*WIDE, "ddp.strategy=zero1"], 8, 1),
    "single, update, muon": ([*WIDE, "optimizer=muon"], 1, 1),
    "ddp on 4, update, muon": ([*WIDE, "optimizer=muon", "ddp.strategy=ddp"], 4, 1),
}
ALL = {**RUNS, **RUNS_OF_CHARACTERS}


def vocabulary_of(name: str) -> int:
    return VOCABULARY if name in RUNS else CHARACTERS


def overrides_of(name: str) -> list[str]:
    overrides, ranks, passes = ALL[name]
    model = MODEL if name in RUNS else CHARACTER_MODEL
    copies = ranks // 4 if name.startswith("tensor") else ranks
    return [*model, f"trainer.batch_size={MICRO * copies * passes}", *overrides]


def job_of(name: str) -> dict[str, Any]:
    sizes = {"world_size": ALL[name][1], "vocab_size": vocabulary_of(name)}
    return job("peak_bytes", overrides=overrides_of(name), **sizes)


def planned(name: str, text: Path) -> dict[str, Any]:
    _, ranks, _ = ALL[name]
    words = [f"data.path={text}", f"data.cache_dir={text.parent}"]
    nodes = max(1, ranks // GPUS)
    words.append(f"ddp.nproc_per_node={ranks // nodes}")
    config = from_mapping(configure(*overrides_of(name), *words))
    plan = make_gpu_plan(config, Machine("h100", nodes), outputs=vocabulary_of(name))
    strategy = name.split(",")[0].split(" on ")[0]
    return plan["gpu"]["strategies"][strategy]


def difference(name: str, found: int, text: Path) -> float:
    """Return by what share a planned peak differs from that of the fake GPU."""
    plan = planned(name, text)
    share = (plan["peak_bytes"] - plan["data_bytes"]) / found - 1
    print(f"{name}: planned {plan['peak_bytes']:,}, found {found:,}, {share:+.3%}")
    return abs(share)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("run", [[job_of(name) for name in RUNS]], ids=["gpt2"])
def test_the_planned_peak_is_that_of_the_fake_gpu(name, run, answer_of, text):
    assert difference(name, result_of(answer_of(job_of(name))), text) < TOLERANCE


@pytest.mark.parametrize("run", [[job_of(name) for name in RUNS]], ids=["gpt2"])
def test_peaks_that_are_known_by_hand(run, answer_of):
    peaks = {name: result_of(answer_of(job_of(name))) for name in RUNS}
    # fp32 averages; DDP's buckets, which the gradients then are views of; two moments of AdamW
    copy = pytest.approx(4 * PARAMETERS, abs=SLACK)
    assert peaks["single, average"] - peaks["single"] == copy
    assert peaks["ddp on 8"] - peaks["single"] == copy
    saved = 8 * (PARAMETERS - EMBEDDING)
    assert peaks["ddp on 8"] - peaks["zero1 on 8"] == pytest.approx(saved, abs=SLACK)
    assert peaks["single, recomputed"] < peaks["single"]
    assert peaks["fsdp on 64"] < peaks["fsdp on 8"] < peaks["single"]


@pytest.mark.parametrize("name", RUNS_OF_CHARACTERS)
@pytest.mark.parametrize("run", [[job_of(name) for name in RUNS_OF_CHARACTERS]], ids=["char"])
def test_the_planned_peak_at_other_moments(name, run, answer_of, text):
    assert difference(name, result_of(answer_of(job_of(name))), text) < ROUGH
