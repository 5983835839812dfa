"""What a case may wait for, and what it must communicate, worked out from its configuration.

Whatever is not in these lists, or another number of it, fails the tests.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fake_gpu.cases import BLOCK, LAYERS, MICRO, WIDTH, Case

STEPS = 2
SAMPLED = 20  # tokens of a sample
EVALUATED = 2  # batches of the validation split
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of an element
SPLIT_LAYERS = ("qkv", "proj", "up", "down")  # by tensor parallelism
Shapes = dict[str, list[int]]  # of the parameters of the whole model


@dataclass(frozen=True)
class Wait:
    """Something that makes the host wait for the GPU, and why it may."""

    phase: str
    what: str  # kind and place, as observe.py names them
    count: int
    reason: str


def waits_of(case: Case, shapes: Shapes) -> list[Wait]:
    """Return everything that the case may wait for."""
    every = [*_in_steps(case, shapes), *_in_evaluation(case), *_in_samples(case, shapes)]
    every += [
        Wait("log", "blocking copy to the host in metrics/meters.py state", 1, "losses to log"),
        Wait("log", "read in metrics/meters.py read", 1, "the gradient norm to log"),
        Wait(
            "log",
            "wait for a stream in distributed/runtime.py now",
            2,
            "the meter's clock ends and begins when the GPU has done its queue",
        ),
        Wait(
            "log",
            "wait for an event in distributed/step_clock.py _seconds",
            STEPS * (case.strategy not in ("fsdp", "hsdp", "tensor")),
            "the time that the work of each step took, unless passes wait for other ranks",
        ),
        Wait(
            "stage",
            "wait for a stream in snapshots/write/async_writer.py _stage",
            1,
            "the copies are complete; on the thread of the snapshot",
        ),
    ]
    return [wait for wait in every if wait.count]


def _in_steps(case: Case, shapes: Shapes) -> list[Wait]:
    """Return the waits of two steps."""
    # AdamW's fused kernel skips a step that overflows itself
    scaler_decides = case.precision == "fp16" and case.optimizer != "adamw"
    strategy = "zero1" if case.strategy == "zero1" else "base"
    return [
        Wait(
            "steps",
            "read in training/trainer.py _send_flags",
            STEPS * case.skip,
            "trainer.on_nonfinite=skip decides by the loss before the update",
        ),
        Wait(
            "steps",
            "read in training/anomaly.py find_in_step",
            STEPS * case.skip,
            "and by the norm of the gradients",
        ),
        Wait(
            "steps",
            f"read in distributed/strategies/{strategy}.py update",
            STEPS * scaler_decides,
            "GradScaler asks whether a gradient overflowed",
        ),
    ]


def _in_evaluation(case: Case) -> list[Wait]:
    own = len(range(case.rank // case.tensor_size, EVALUATED, case.copies))
    passes = math.ceil(EVALUATED / case.copies) if case.shards > 1 else own
    return [
        Wait(
            "evaluate",
            "blocking copy to the GPU in tasks/language_model.py total",
            2 * (passes > 0),
            "the tables of bytes and characters per token, once",
        ),
        Wait(
            "evaluate",
            "read in training/evaluation/evaluator.py _means",
            6 * (own > 0),
            "four sums and two counts, once for a split",
        ),
    ]


def _in_samples(case: Case, shapes: Shapes) -> list[Wait]:
    generates = case.rank == 0
    gathers = case.strategy in ("fsdp", "hsdp", "tensor")
    to_host = (
        "blocking copy to the host in distributed/strategies/fsdp.py keep"
        if case.shards > 1
        else "blocking copy to the host in distributed/strategies/base.py work_on_copy"
    )
    copies = len(shapes) * (gathers and generates)
    return [
        Wait(
            "sample",
            to_host,
            copies,
            "rank zero gathers a divided model on the host, tensor by tensor",
        ),
        Wait(
            "sample",
            "blocking copy to the GPU in distributed/strategies/base.py work_on_copy",
            copies,
            "and moves the whole model to its GPU",
        ),
        Wait(
            "sample",
            "blocking copy to the GPU in inference/generate.py generate_text",
            generates,
            "the prompt",
        ),
        Wait(
            "sample",
            "read in inference/generate.py check_logits",
            generates,
            "weights that are not finite are found at the first token",
        ),
        Wait(
            "sample",
            "blocking copy to the host in inference/generate.py generate_text",
            generates,
            "the text, once",
        ),
    ]


# Collectives of a step: by kind and ranks, their number and bytes.
Collectives = dict[str, list[int]]


def collectives_of(case: Case, shapes: Shapes) -> Collectives:
    """Return the collectives on the GPU in one step.

    The bytes are those of the whole message: the parts of all ranks where each has one.
    """
    if case.ranks == 1:
        return {}
    if case.strategy in ("fsdp", "hsdp"):
        return _of_fsdp(case, shapes)
    if case.strategy == "tensor":
        return _of_tensor_parallel(case, shapes)
    numel = sum(map(math.prod, shapes.values()))
    found = {f"all_reduce of {case.ranks}": [1, 4 * numel]}  # fp32 gradients, once
    if case.strategy == "zero1":  # an owner sends all of its parameters at once
        owners = min(case.ranks, len(shapes))
        found[f"broadcast of {case.ranks}"] = [owners, 4 * numel]
    elif case.optimizer == "muon":
        found[f"all_gather of {case.ranks}"] = [1, _muon_bytes(case, shapes)]
    return found


def _muon_bytes(case: Case, shapes: Shapes) -> int:
    """Return the bytes of the orthogonalized matrices in bf16, padded to equal shares."""
    stacks: Counter[tuple[int, int]] = Counter()
    for name, shape in shapes.items():
        if len(shape) == 2 and "embedding" not in name and not name.startswith("head"):
            parts = 3 if case.model == "modern" and "qkv" in name else 1
            stacks[(shape[0] // parts, shape[1])] += parts
    padded = 0
    for (rows, columns), count in stacks.items():
        padded += math.ceil(count / case.ranks) * case.ranks * rows * columns
    return 2 * padded


def _of_fsdp(case: Case, shapes: Shapes) -> Collectives:
    """Return what fully_shard communicates: for each micro-batch, each block and the rest.

    Weights in the type of the products, before forward and before backward; fp32 gradients.
    """
    shards = case.shards
    padded = 0
    for shape in shapes.values():
        padded += math.ceil(shape[0] / shards) * shards * math.prod(shape[1:])
    units = (LAYERS + 1) * case.accumulation
    gathered = 2 * padded * BYTES[case.precision] * case.accumulation
    reduced = 4 * padded * case.accumulation
    found = {
        f"all_gather of {shards}": [2 * units, gathered],
        f"reduce_scatter of {shards}": [units, reduced],
        f"all_reduce of {shards}": [1, 4 * len(shapes)],  # the norms of all gradients
    }
    if case.precision == "fp16":  # whether a gradient overflowed
        found[f"all_reduce of {shards}"][0] += 1
        found[f"all_reduce of {shards}"][1] += 4
    if case.strategy == "hsdp":  # each rank its part, with those of the other nodes
        replicas = case.ranks // shards
        own = found.setdefault(f"all_reduce of {replicas}", [0, 0])
        own[0] += units
        own[1] += reduced // shards
    return found


def _of_tensor_parallel(case: Case, shapes: Shapes) -> Collectives:
    """Return the activations of two pairs of layers per block, and the gradients of a part."""
    elements = MICRO * BLOCK * WIDTH
    # recomputing a block ends before its last all-reduce, whose result nothing needs
    forward = (3 if case.recompute else 2) * LAYERS * case.accumulation
    backward = 2 * LAYERS * case.accumulation  # fp32: before the products, autocast converts
    sent = elements * (forward * BYTES[case.precision] + backward * 4)
    found = {"all_reduce of 2": [forward + backward + 1, sent + 4]}  # and the norm
    numel = 0
    for name, shape in shapes.items():
        is_split = any(f".{layer}." in name for layer in SPLIT_LAYERS)
        numel += math.prod(shape) // (2 if is_split else 1)
    if case.copies > 1:
        found[f"all_reduce of {case.copies}"] = [len(shapes), 4 * numel]
    return found
