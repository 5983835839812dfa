"""Part 8 of gpu.py: run ranks on one GPU, two over gloo, which can share a GPU, and one over NCCL.

A single rank has no peer. The NCCL half therefore shows two things: NCCL accepts the types, streams
and hooks of each strategy, and the steps give the same numbers as a process without NCCL.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from common import compose_config, in_fresh_process
from gpu_first import data
from gpu_runs import Part, Table, digest_of_training
from gpu_training import CHAR, TINY, our_command
from gpu_ways import one_rank
from trainers import PLAIN

HEADER = ["what", "losses", "of one process"]
STEPS = 4
TOLERANCE = 2e-3  # largest difference of losses in fp32
# Overrides by name. Each case trains with the strategy that the package gives to several ranks.
STRATEGIES = {
    "ddp": ["ddp.strategy=ddp"],
    "ddp, hook fp16": ["ddp.strategy=ddp", "ddp.comm_hook=fp16"],
    "ddp, hook bf16": ["ddp.strategy=ddp", "ddp.comm_hook=bf16"],
    "ddp, Muon": ["ddp.strategy=ddp", "optimizer=muon"],
    "zero1": ["ddp.strategy=zero1"],
    "fsdp": ["ddp.strategy=fsdp"],
}


def ranks_on_one_gpu(part: Part) -> Table:
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []
    with part.within(0.7):
        killed_over_gloo(part, figures, rows)
    over_nccl(part, figures, rows)
    return figures, HEADER, rows


def killed_over_gloo(part: Part, figures: dict[str, Any], rows: list[list[str]]) -> None:
    """Compare weights and moments of two ranks with and without kill -9 of one of them."""
    setting = TINY if part.dry else CHAR
    # The number of steps, the interval between snapshots, and the step of the kill.
    total, every, kill_at = (30, 5, 8) if part.dry else (200, 25, 60)
    words = [
        "ddp.nproc_per_node=2",
        "ddp.backend=gloo",
        "trainer.deterministic=true",
        "run.resume=auto",
        f"trainer.max_steps={total}",
        f"snapshot.every_steps={every}",
        "trainer.compile=false",
        "trainer.log_every=2",
    ]
    digests = []
    for kill in (0, kill_at):
        run = f"gloo-{'killed' if kill else 'whole'}"
        command = our_command(part, setting, PLAIN, *words, f"run.name={run}")
        work = partial(digest_of_training, part, command, part.scratch / "runs" / run, kill)
        digests.append(part.measure(f"two ranks over gloo, {run}", work))
    is_same = None if None in digests else digests[0] == digests[1]
    figures["gloo_identical"] = is_same
    if is_same is False:
        part.failures.append("two ranks over gloo: the bytes after kill -9 differ")
    result = {True: "yes", False: "NO", None: "not measured"}[is_same]
    rows.append(["two ranks over gloo: the same bytes after kill -9", result, "yes"])


def over_nccl(part: Part, figures: dict[str, Any], rows: list[list[str]]) -> None:
    """Train a few steps of one rank in every strategy. Compare the losses to a plain process."""
    backend = "gloo" if part.dry else "NCCL"
    figures["losses"] = {}
    for name, words in STRATEGIES.items():
        train = partial(in_fresh_process, compare_losses, part.device, [*data(part), *words])
        found = part.measure(f"one rank, {name}", partial(train, limit_s=part.left_s()))
        if found is None:
            continue
        figures["losses"][name] = found
        alone, grouped = found
        apart = max(abs(loss - other) for loss, other in zip(grouped, alone, strict=True))
        if apart > TOLERANCE:
            part.failures.append(f"one rank, {name}: losses {grouped}, not {alone}")
        texts = [" ".join(f"{loss:.4f}" for loss in losses) for losses in (grouped, alone)]
        rows.append([f"one rank over {backend}, {name}", *texts])


def compare_losses(device: str, words: list[str]) -> tuple[list[float], list[float]]:
    """Compute the losses of a few steps twice: in a plain process, and with the strategy's code.

    The package does not give a single rank a process group. This function joins one and builds the
    strategy itself.
    """
    alone = losses_of_steps(device, words, in_group=False)
    with one_rank(device):
        return alone, losses_of_steps(device, words, in_group=True)


def losses_of_steps(device: str, words: list[str], in_group: bool) -> list[float]:
    from mingpt_ddp.data.dataloader import plan_batches
    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.process.env import DistEnv
    from mingpt_ddp.tasks import build_task
    from mingpt_ddp.training.train_step import TrainStep
    from mingpt_ddp.training.trainable import build_trainable

    small = [
        "model=gpt_nano",
        "model.dropout=0.0",
        "data.block_size=32",
        "trainer.batch_size=4",
        "trainer.max_steps=100",
        "trainer.precision=fp32",
        "trainer.compile=false",
        "optimizer.warmup_steps=1",
    ]
    config = compose_config(*small, *words, f"trainer.device={device}")
    runtime = Runtime(config, DistEnv())
    if in_group:
        runtime.strategy = strategy_of_ranks(config, runtime)
    task = build_task(config, runtime.group)
    loader = task.train_loader(runtime.device)
    trainable = build_trainable(runtime, task)
    train_step = TrainStep(runtime, task, loader, plan_batches(config, 1), trainable)
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(float(train_step.passes(step)["loss"]))
        train_step.clip()
        train_step.update(step)
    loader.close()
    return losses


def strategy_of_ranks(config: Any, runtime: Any) -> Any:
    """Build the strategy that the package would give to several ranks."""
    from mingpt_ddp.distributed.strategies import strategy_class

    strategy = strategy_class(config.ddp, world_size=2)
    return strategy(config.ddp, config.trainer, runtime.device, runtime.group, compiles=False)
