"""Check training steps on the fake GPU: their memory is as planned, and the host need not wait.

    pytest tests/fake_gpu -s

prints the error of each plan, and the bytes that each strategy communicates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from multiprocess.ranks import configure

from fake_gpu.process import job
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.metrics.gpus import Machine
from mingpt_ddp.study.planning.plan import make_plan

TOLERANCE = 0.1  # relative error that a plan may have
MICRO = 4
GPUS = 8  # GPUs of a node
GPT2 = ["model=gpt2", "model.n_layer=2", "data.block_size=1024"]
CHARACTERS = ["model=gpt_mini", "model.n_layer=4", "data.block_size=256"]
WIDE = [*CHARACTERS, "model.n_embd=1024", "model.n_head=16", "data.block_size=64"]
MODERN = ["model=modern_mini", "model.n_layer=2", "data.block_size=1024"]
MODERN_CHARACTERS = ["model=modern_mini", "model.n_layer=4", "data.block_size=256"]
RECOMPUTED = "trainer.activation_checkpointing=true"
SMALL = ["model=gpt_nano", "model.n_layer=1", "data.block_size=16"]


@dataclass(frozen=True)
class Case:
    """A training step of a rank, with its settings and the expected waits."""

    words: list[str]
    strategy: str = "single"
    ranks: int = 1
    passes: int = 1  # number of micro-batches of a rank in a step
    ranks_per_copy: int = 1  # number of ranks that share a copy of the model
    # How often the host waits for the GPU, by kind and place.
    waits: dict[str, int] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary. With the large one, memory has its peak in the loss."""
        return 50257 if "data.block_size=1024" in self.words else 65

    def overrides(self) -> list[str]:
        batch = MICRO * self.ranks // self.ranks_per_copy * self.passes
        return [
            f"ddp.strategy={'auto' if self.ranks_per_copy > 1 else self.strategy}",
            f"ddp.tensor_parallel={self.ranks_per_copy}",
            f"trainer.batch_size={batch}",
            f"trainer.micro_batch_size={MICRO}",
            "trainer.precision=bf16",
            *self.words,
        ]

    def job(self) -> dict[str, Any]:
        sizes = {"world_size": self.ranks, "vocab_size": self.vocabulary}
        return job("take_step", overrides=self.overrides(), **sizes)


PLANNED = {
    "single": Case(GPT2),
    "single, fp32": Case([*GPT2, "trainer.precision=fp32"]),
    "single, average": Case([*GPT2, "trainer.ema=0.999"]),
    "single, Muon": Case([*GPT2, "optimizer=muon"]),
    "single, modern": Case(MODERN),
    "ddp on 8": Case(GPT2, "ddp", 8),
    "zero1 on 8": Case(GPT2, "zero1", 8),
    "fsdp on 64": Case(GPT2, "fsdp", 64),
    "fsdp on 8, 2 micro-batches": Case(GPT2, "fsdp", 8, passes=2),
    "hsdp on 64": Case(GPT2, "hsdp", 64),
    "tensor parallel on 8": Case(
        [*GPT2, "model.dropout=0"], "tensor_parallel", 8, ranks_per_copy=4
    ),
    "characters": Case(CHARACTERS),
    "characters, recomputed": Case([*CHARACTERS, RECOMPUTED]),
    "characters, modern": Case([*MODERN_CHARACTERS, "model.dropout=0.1"]),
    "characters, modern, recomputed, fsdp on 8": Case([*MODERN_CHARACTERS, RECOMPUTED], "fsdp", 8),
    "wide": Case(WIDE),
    "wide, recomputed, 2 micro-batches": Case([*WIDE, RECOMPUTED], passes=2),
    "wide, ddp on 8, 2 micro-batches": Case(WIDE, "ddp", 8, passes=2),
    "wide, Muon": Case([*WIDE, "optimizer=muon"]),
    "wide, 6 layers, Muon, ddp on 4": Case([*WIDE, "model.n_layer=6", "optimizer=muon"], "ddp", 4),
}
# Settings that could make the host wait for the GPU. If it waits, the name of the case says why.
FP16 = "trainer.precision=fp16"
SKIP = "trainer.on_nonfinite=skip"
OTHERS = {
    "fp16: the fused AdamW skips an overflow itself": Case([*SMALL, FP16]),
    "fp16 and Muon: the scaler asks whether a gradient overflowed": Case(
        [*SMALL, FP16, "optimizer=muon"], waits={"read in distributed/strategies/base.py update": 1}
    ),
    "fp16 and Muon on ranks": Case(
        [*SMALL, FP16, "optimizer=muon"],
        "zero1",
        8,
        waits={"read in distributed/strategies/zero1.py update": 1},
    ),
    "fp16 with fsdp": Case([*SMALL, FP16], "fsdp", 8),
    "the anomaly policy decides before the update": Case(
        [*SMALL, SKIP],
        waits={
            "read in training/trainer.py _send_flags": 1,
            "read in training/anomaly.py find_in_step": 1,
        },
    ),
    "deterministic": Case([*SMALL, "trainer.deterministic=true"], "ddp", 8),
    "label smoothing and average": Case(
        [*SMALL, "task.label_smoothing=0.1", "trainer.ema=0.99"], "fsdp", 64
    ),
}
CASES = {**PLANNED, **OTHERS}


def plan_of(case: Case, text: Path) -> dict[str, Any]:
    """Plan a case. Return the plan's row for the strategy of the case."""
    nodes = max(1, case.ranks // GPUS)
    words = [f"data.path={text}", f"data.cache_dir={text.parent}"]
    words.append(f"ddp.nproc_per_node={case.ranks // nodes}")
    config = from_mapping(configure(*case.overrides(), *words))
    plan = make_plan(Job(config), Machine("h100", nodes), vocab_size=case.vocabulary)
    return plan["strategies"][case.strategy]


def sent_by_a_rank(kind: str, size: int) -> float:
    """Return the bytes that a rank sends in a ring. An all-reduce goes round twice.

    Args:
        kind: Kind and number of ranks, such as `all_gather of 8`.
        size: Bytes of the whole messages.
    """
    name, _, ranks = kind.partition(" of ")
    return (2 if name == "all_reduce" else 1) * size * (int(ranks) - 1) / int(ranks)


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_right_to_within_a_tenth(name, result_of, text):
    case = PLANNED[name]
    result = result_of(case.job())
    row = plan_of(case, text)
    planned = row["peak_bytes"] - row["data_bytes"]  # the fake GPU does not keep the text
    found = result["peak"]
    print(f"{planned / found - 1:+6.1%}  planned {planned:13,}  found {found:13,}  {name}")
    assert planned == pytest.approx(found, rel=TOLERANCE)

    sent = {kind: sent_by_a_rank(kind, size) for kind, (_, size) in result["collectives"].items()}
    print("        ", ", ".join(f"{kind}: {size:,.0f}" for kind, size in sent.items()))
    assert row["wire_bytes_per_step"] == pytest.approx(sum(sent.values()), rel=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_the_host_does_not_wait_in_a_step(name, result_of):
    assert result_of(CASES[name].job())["waits"] == CASES[name].waits


def test_waits_are_seen(result_of):
    kinds = (
        "read",
        "blocking copy to the host",
        "blocking copy to the GPU",
        "copy of pageable memory to the GPU",
        "mul of host and GPU",
        "wait for the GPU",
    )
    found = result_of(job("waits_of_faults"))
    # The job calls no function of the package, and such waits are attributed to the backward pass.
    assert found == {f"{kind} in backward": 1 for kind in kinds}


def test_times_are_read_once_the_gpu_has_done_its_work(result_of):
    waits = result_of(job("waits_of_timing", overrides=SMALL, vocab_size=65))
    assert {
        "wait for a stream in distributed/runtime.py now",
        "wait for an event in distributed/step_clock.py _seconds",
    } <= waits.keys()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_samples_without_a_graph(deterministic, result_of):
    """Deterministic algorithms read indices on the host, which a CUDA graph cannot do."""
    words = [*SMALL, f"trainer.deterministic={deterministic}".lower()]
    graph = result_of(job("decodes_with_a_graph", overrides=words, vocab_size=65))
    assert graph is not deterministic


EVERYTHING = [
    "optimizer=muon",
    "trainer.precision=fp16",
    "trainer.activation_checkpointing=true",
    "trainer.ema=0.99",
    "trainer.on_nonfinite=skip",
]


@pytest.mark.parametrize(
    ("ranks", "rank", "overrides", "gpus"),
    [
        (4, 2, EVERYTHING, [2, 6]),
        (2, 1, [], [1, 3, 5, 7]),
        (8, 7, [], [7]),
    ],
)
def test_a_model_that_places_itself(ranks, rank, overrides, gpus, result_of):
    """The ranks of a node share its GPUs. Operations on tensors of two GPUs are errors."""
    words = ["data.block_size=16", "trainer.batch_size=16", "trainer.micro_batch_size=2"]
    words += overrides
    result = result_of(job("several_gpus", ranks=ranks, rank=rank, overrides=words))
    last = len(gpus) - 1
    expected = {"token_embedding.weight": gpus[0], "head.1.weight": gpus[last]}
    for block in range(4):
        expected[f"blocks.{block}.qkv.weight"] = gpus[block * len(gpus) // 4]
    assert {name: result["gpus"][name] for name in expected} == expected
    if ranks > 1:
        used = {*result["gpus"].values()}
        sent = result["collectives"][f"all_reduce of {ranks}"]
        assert sent == [len(used), 4 * sum(result["sizes"].values())]  # a bucket for each GPU
