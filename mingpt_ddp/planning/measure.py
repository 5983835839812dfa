"""Measure one rank that trains alone: seconds of its passes, updates and evaluations, and bytes."""

import copy
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.data.dataloader import Split, plan_batches
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import count_parameters, eval_mode, flops_per_token
from mingpt_ddp.tasks.outputs import outputs_of
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.memory import refuse_out_of_memory
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Trainable, build_trainable

# Steps are measured until one of these limits, but at least two after the first.
MOST_STEPS = 20
MEASURED_S = 4.0
EVALUATED = 5  # batches


@dataclass(frozen=True)
class Measured:
    """Seconds, and bytes, of one rank that trains alone."""

    micro_s: float  # forward and backward pass of a micro-batch
    update_s: float  # clipping and the optimizer step
    evaluation_s: float  # the whole validation split
    stall_s: float  # the staging copy of a snapshot
    parameters: int  # a number
    flops: float | None  # per item
    memory: dict[str, int]  # by part: weights, optimizer, average, gradients, activations
    snapshot: int


def measure_training(runtime: Runtime, task: Task, size: int) -> Measured:
    """Train and evaluate for some seconds, with steps of one micro-batch.

    Args:
        runtime: of one rank.
        size: of a micro-batch.

    Raises:
        ConfigError: there is too little memory.
    """
    task = copy.copy(task)
    trainer = replace(task.config.trainer, batch_size=size, micro_batch_size=size)
    task.config = replace(task.config, trainer=trainer)
    with refuse_out_of_memory(task.config, runtime, f"a micro-batch of {size}"):
        return _train_and_evaluate(runtime, task)


def _train_and_evaluate(runtime: Runtime, task: Task) -> Measured:
    split = task.split("val", runtime.device)
    assert split is not None
    loader = task.train_loader(runtime.device)
    plan = plan_batches(task.config, 1)
    try:
        trainable = build_trainable(runtime, task)
        model = trainable.model
        first = loader.get_batch(1, plan, 0)[0]
        activations = _activations(runtime, task, model, first.batch)
        length = RunLength(task.config, loader.steps_per_epoch)
        train_step = TrainStep(runtime, task, loader, plan, trainable, length)
        passes, updates = _time_steps(runtime, train_step)
        evaluation_s = _time_evaluation(runtime, task, model, split)
        begin = runtime.now()
        memory = _copy_snapshot(trainable)
        stall_s = runtime.now() - begin
    finally:
        loader.close()
    snapshot = sum(memory.values())
    trained = [p for p in model.parameters() if p.requires_grad]
    memory["gradients"] = sum(p.numel() * p.element_size() for p in trained)
    memory["activations"] = activations
    return Measured(
        micro_s=statistics.median(passes),
        update_s=statistics.median(updates),
        evaluation_s=evaluation_s,
        stall_s=stall_s,
        parameters=count_parameters(model),
        flops=flops_per_token(model),
        memory=memory,
        snapshot=snapshot,
    )


def _time_steps(runtime: Runtime, train_step: TrainStep) -> tuple[list[float], list[float]]:
    """Train some steps; return the seconds of their passes, and of their updates.

    The first, which allocates, does not count.
    """
    passes: list[float] = []
    updates: list[float] = []
    train_step.warm_up()
    deadline = runtime.now() + MEASURED_S
    with progress_bar(runtime.group.env, MOST_STEPS, "measuring", "step") as bar:
        for step in range(1, MOST_STEPS + 1):
            begin = runtime.now()
            train_step.passes(step)
            passed = runtime.now()
            train_step.clip()
            train_step.update(step)
            end = runtime.now()
            bar.update()
            if step > 1:
                passes.append(passed - begin)
                updates.append(end - passed)
            if step > 2 and end > deadline:
                break
    return passes, updates


def _activations(runtime: Runtime, task: Task, model: nn.Module, batch: Any) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, besides the parameters."""
    parameter_storages = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters()
    }
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), runtime.autocast():
        # The losses hold what is kept, until the return.
        losses = outputs_of(task.loss(model, runtime.to_device(batch))).losses
    return sum(sizes.values()) if losses else 0


@torch.no_grad()
def _time_evaluation(runtime: Runtime, task: Task, model: nn.Module, split: Split) -> float:
    """Return the seconds to evaluate a split, from its first batches."""
    moments = [runtime.now()]
    with eval_mode(model), runtime.autocast():
        for batch in itertools.islice(split.batches(0, 1), EVALUATED):
            task.metrics(model, runtime.to_device(batch))
            moments.append(runtime.now())
    seconds = [end - begin for begin, end in itertools.pairwise(moments)]
    return statistics.median(seconds) * len(split)


def _copy_snapshot(trainable: Trainable) -> dict[str, int]:
    """Copy to host memory what a snapshot holds; return its bytes by part."""
    tensors = trainable.tensors()
    return {
        "weights": _copy(tensors["model"]),
        "optimizer": _copy(tensors["optimizer"]),
        "average": _copy(tensors.get("ema", {})),
    }


def _copy(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.to("cpu", copy=True).nbytes for tensor in tensors.values())
