"""Measure the time and memory of some steps, with one rank that trains alone on this machine."""

import copy
import itertools
import statistics
from dataclasses import dataclass, replace

import torch
from torch import nn

from mingpt_ddp.data.dataloader import Split, plan_batches
from mingpt_ddp.distributed.device.device import peak_memory
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import eval_mode
from mingpt_ddp.study.planning.batch import BatchOnRanks
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.memory import refuse_out_of_memory
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

# The first step allocates memory, so its time does not count. After the time limit, no step begins.
MAX_TIMED_STEPS = 20
TIME_LIMIT_S = 4.0
EVALUATED_BATCHES = 5


@dataclass(frozen=True)
class Measured:
    """The measured times and memory of one rank. The times are medians."""

    step_s: float
    items_per_s: float  # tokens or samples per second
    evaluation_s: float  # time to evaluate the whole validation split
    peak_bytes: int  # peak memory of the GPU, or of this process on a CPU


def measure(runtime: Runtime, task: Task, batch: BatchOnRanks) -> Measured:
    """Train and evaluate for some seconds, with the work of the busiest rank.

    Raises:
        ConfigError: The machine has too little memory.
    """
    rows = batch.micro_batch_size
    task = copy.copy(task)
    trainer = replace(
        task.config.trainer,
        batch_size=rows * batch.micro_batches_per_rank,
        micro_batch_size=rows,
    )
    task.config = replace(task.config, trainer=trainer)
    loader = task.train_loader(runtime.device)
    try:
        with refuse_out_of_memory(task.config, runtime, f"a micro-batch of {rows}"):
            trainable = build_trainable(runtime, task)
            length = RunLength(task.config, loader.steps_per_epoch)
            plan = plan_batches(task.config, 1)
            step_s = _time_steps(runtime, TrainStep(runtime, task, loader, plan, trainable, length))
            split = task.split("val", runtime.device)
            assert split is not None
            evaluation_s = _time_evaluation(runtime, task, trainable.model, split)
    finally:
        loader.close()
    peak = peak_memory(runtime.device)
    return Measured(step_s, loader.items_per_step / step_s, evaluation_s, peak)


def _time_steps(runtime: Runtime, train_step: TrainStep) -> float:
    """Return the median time of a step in seconds."""
    train_step.warm_up()
    moments = [runtime.now()]
    for step in range(1, MAX_TIMED_STEPS + 2):
        train_step.passes(step)
        train_step.clip()
        train_step.update(step)
        moments.append(runtime.now())
        if step > 2 and moments[-1] - moments[0] > TIME_LIMIT_S:
            break
    return statistics.median(end - begin for begin, end in itertools.pairwise(moments[1:]))


@torch.no_grad()
def _time_evaluation(runtime: Runtime, task: Task, model: nn.Module, split: Split) -> float:
    """Estimate how many seconds a split takes to evaluate, from its first batches."""
    moments = [runtime.now()]
    with eval_mode(model), runtime.autocast():
        for batch in itertools.islice(split.batches(0, 1), EVALUATED_BATCHES):
            task.metrics(model, runtime.to_device(batch))
            moments.append(runtime.now())
    seconds = [end - begin for begin, end in itertools.pairwise(moments)]
    return statistics.median(seconds) * len(split)
