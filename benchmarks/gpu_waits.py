"""Count where the host waits for the GPU, for gpu.py.

torch.cuda.set_sync_debug_mode("warn") reports the waits. It sees blocking copies, and
synchronization of streams and devices. It does not see events, or waits inside a library.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, compose_config

PACKAGE = ROOT / "mingpt_ddp"
MESSAGE = "called a synchronizing CUDA operation"
COUNTED_STEPS = 2  # number of steps after the first one, which allocates memory
DECODED_TOKENS = 16
# The phases of a run. A step has a name of its own if GradScaler must read whether a gradient has
# overflowed. AdamW's fused kernel checks this itself.
STEP, SCALED_STEP = "step", "step in fp16 without AdamW"
EVALUATION, STAGING, DECODING, LOGGING = "evaluation", "staging", "decoding", "logging"
# The reasons why some places may wait, by phase, file below mingpt_ddp/ and function. A step may
# not wait anywhere.
PERMITTED = {
    (SCALED_STEP, "distributed/strategies/base.py", "update"): "GradScaler reads the overflow",
    (EVALUATION, "tasks/language_model.py", "total"): "once: the tables of the tokens' lengths",
    (EVALUATION, "training/evaluation/evaluator.py", "_means"): "once per split: reads the sums",
    (
        STAGING,
        "snapshots/write/async_writer.py",
        "_stage",
    ): "the snapshot thread waits for its copies",
    (DECODING, "inference/decoding.py", "__init__"): "once per text: captures the CUDA graph",
    (DECODING, "inference/generate.py", "check_logits"): "once per text: are they finite",
    (DECODING, "inference/generate.py", "generate_text"): "the prompt, the text at its end",
    (LOGGING, "distributed/runtime.py", "now"): "per log line: the clock waits for the queue",
    (LOGGING, "metrics/meters.py", "state"): "per log line: reads the sums",
    (LOGGING, "metrics/meters.py", "read"): "per log line: reads the norm",
}
Waits = Counter[tuple[str, str, int, str]]  # phase, file below mingpt_ddp/, line, function


def place(stack: Sequence[traceback.FrameSummary]) -> tuple[str, int, str]:
    """Return the file, the line and the function of the package's innermost frame.

    If no frame belongs to the package, take the innermost frame of all.
    """
    # The names of comprehensions and lambdas begin with "<".
    functions = [frame for frame in stack if not frame.name.startswith("<")]
    ours = [frame for frame in functions if Path(frame.filename).is_relative_to(PACKAGE)]
    frame = (ours or functions)[-1]
    path = Path(frame.filename)
    file = path.relative_to(PACKAGE).as_posix() if ours else path.name
    return file, frame.lineno or 0, frame.name


@contextlib.contextmanager
def counted(phase: str, device: str, waits: Waits) -> Iterator[None]:
    """Count the waits in this context by place. torch reports each one as a warning."""

    def count(message: Warning | str, *_: Any, **__: Any) -> None:
        if MESSAGE in str(message):
            waits[(phase, *place(traceback.extract_stack()))] += 1

    import torch

    set_mode = torch.cuda.set_sync_debug_mode if device == "cuda" else id
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        set_mode("warn")
        try:
            yield
        finally:
            set_mode("default")


def cases(dry: bool) -> list[list[str]]:
    """List the overrides of each case: models x optimizers x precisions, and two more."""
    models = ["model=modern_nano"] if dry else ["model=gpt_nano", "model=modern_nano"]
    optimizers = (
        ["optimizer=muon"] if dry else ["optimizer=adamw", "optimizer=muon", "optimizer=sgd"]
    )
    precisions = ["fp32"] if dry else ["fp32", "bf16", "fp16"]
    found = []
    for model, optimizer, precision in itertools.product(models, optimizers, precisions):
        found.append([model, optimizer, f"trainer.precision={precision}"])
    for more in ("trainer.activation_checkpointing=true", "trainer.deterministic=true"):
        found.append([*found[0], more])
    return found


def count_waits(
    device: str, paths: list[str], cases: list[list[str]]
) -> list[tuple[str, str, int, str, int]]:
    """Count the waits of a few eager steps of each case, and of the phases that follow.

    These are evaluation, staging, decoding and logging. Call this function in a new process,
    because it changes settings of torch.

    Returns:
        The phase, file, line, function and number of the waits at each place.
    """
    waits: Waits = Counter()
    for words in cases:
        _count_case(device, [*paths, *words], waits)
    return [(*where, number) for where, number in sorted(waits.items())]


def _count_case(device: str, words: list[str], waits: Waits) -> None:
    import torch

    from mingpt_ddp.data.dataloader import plan_batches
    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.inference.generate import SamplingParams, generate_text
    from mingpt_ddp.metrics.meters import Meter
    from mingpt_ddp.process.env import DistEnv
    from mingpt_ddp.snapshots.write.async_writer import AsyncSave, Capture
    from mingpt_ddp.snapshots.write.ledger import Ledger
    from mingpt_ddp.tasks import build_task
    from mingpt_ddp.training.evaluation.evaluator import Evaluator
    from mingpt_ddp.training.train_step import TrainStep
    from mingpt_ddp.training.trainable import build_trainable

    small = [
        "data.block_size=32",
        "trainer.batch_size=4",
        "trainer.micro_batch_size=2",
        "trainer.max_steps=100",
        "data.truncate=0.01",
        "model.dropout=0.1",
    ]
    config = compose_config(*small, f"trainer.device={device}", "trainer.compile=false", *words)
    runtime = Runtime(config, DistEnv())
    task: Any = build_task(config, runtime.group)
    loader = task.train_loader(runtime.device)
    trainable = build_trainable(runtime, task)
    train_step = TrainStep(runtime, task, loader, plan_batches(config, 1), trainable)
    evaluator = Evaluator(task, runtime)
    meter = Meter(runtime, 64, "tokens")
    buffers: dict[str, Any] = {}
    is_scaled = runtime.precision == "fp16" and config.optimizer.name != "adamw"

    def steps(first: int, last: int) -> None:
        for step in range(first, last + 1):
            losses = train_step.passes(step)
            grad_norm = train_step.clip()
            train_step.update(step)
            meter.record(losses, grad_norm, train_step.phase.fetch_s)

    def stage() -> None:
        weights: dict[str, Any] = {"model.safetensors": trainable.tensors()["model"]}
        save = AsyncSave(runtime, [], buffers, Capture(1, weights), print, Ledger(Path()))
        save._stage()

    def decode() -> None:
        tokenizer = task.tokenizer
        generate_text(trainable.model, tokenizer, "", DECODED_TOKENS, SamplingParams(), seed=0)

    work = {
        SCALED_STEP if is_scaled else STEP: partial(steps, 2, 1 + COUNTED_STEPS),
        LOGGING: meter.read,
        EVALUATION: partial(evaluator.run, trainable.model, "val"),
        STAGING: stage,
        DECODING: decode,
    }
    try:
        steps(1, 1)
        stage()  # the first call allocates the buffers
        for phase, act in work.items():
            if device == "cuda":
                torch.cuda.synchronize()
            with counted(phase, device, waits):
                act()
    finally:
        loader.close()
        runtime.close()
