"""What a configuration means, without training it: sizes from the model and the data, times from a
few steps here.
"""

import copy
import hashlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.compile import should_compile
from mingpt_ddp.distributed.device import device_name, total_memory
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.distributed.machine import threads_per_worker
from mingpt_ddp.distributed.process_group import check_ranks
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies import check_strategy
from mingpt_ddp.distributed.tensor_parallel import check_tensor_parallel
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import count_parameters, eval_mode, flops_per_token
from mingpt_ddp.models.ops import resolve_device
from mingpt_ddp.optim.lr_schedule import scale_lr
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.storage.run_dir import run_directory
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task, named_losses
from mingpt_ddp.training.doubts import find_doubts
from mingpt_ddp.training.preflight import check_fits, newest_snapshot, with_batch_size
from mingpt_ddp.training.save_schedule import best_interval
from mingpt_ddp.training.train_step import TrainStep, build_model_and_optimizer, count_steps
from mingpt_ddp.training.warm_start import warm_start
from mingpt_ddp.training.weight_average import WeightAverage

# measured: until one of these limits, but at least two steps after the first
MOST_STEPS = 20
MEASURED_S = 4.0
EVALUATED = 5  # batches
WRITTEN = 1 << 25  # bytes, to measure a disk
WORLD_SIZES = (1, 2, 4, 8)
STATE = ("weights", "optimizer", "average", "gradients")  # of a rank, besides activations
# The parts of the state that the ranks of a strategy divide.
DIVIDED = {"zero1": ("optimizer",)} | dict.fromkeys(("fsdp", "hsdp"), STATE)


@dataclass(frozen=True)
class Measured:
    """Seconds, and bytes, of one rank that trains alone."""

    micro_s: float  # forward and backward pass of a micro-batch
    update_s: float  # clipping and the optimizer step
    evaluation_s: float  # the whole validation split
    stall_s: float  # the staging copy of a snapshot
    parameters: int  # a number
    flops: float | None  # per item
    memory: dict[str, int]  # by part of STATE, and activations
    snapshot: int


def make_plan(config: Config, typed: Container[str] = ()) -> dict[str, Any]:
    """Return what a configuration means, as JSON values: bytes, seconds and counts.

    One rank takes a few steps alone, so times leave out communication. Only the cache of the data
    is written.

    Args:
        typed: the keys that the command line sets.

    Raises:
        UserError: training would refuse the configuration too, or a rank alone cannot hold the
            model.
    """
    ranks = config.ddp.local_workers or 1
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_worker(ranks))
    runtime = Runtime(_alone(config), DistEnv())
    newest = newest_snapshot(config, [])[0] if config.run.init_from is not None else None
    warm = warm_start(config, newest and newest.state, typed, runtime.group)
    given = warm.config if warm else config
    config, batch = _at(given, ranks)
    task = build_task(_alone(config), runtime.group, warm.state if warm else {})
    with task.discarded_if_refused():
        if warm:
            warm.check(task)
        check_fits(task.config, runtime, task)
        loader = task.train_loader(runtime.device)
    loader.close()
    measured = _measure(runtime, task, batch["micro_batch_size"])
    steps = count_steps(config, loader.steps_per_epoch)
    items = steps * loader.items_per_step
    step_s = _step_s(measured, batch)
    snapshots = _snapshots(config, measured, steps, step_s, loader.steps_per_epoch)
    evaluations = -(-steps // (config.trainer.eval_every or steps))
    evaluation_s = measured.evaluation_s / batch["copies"]
    seconds = (steps * step_s, evaluations * evaluation_s, snapshots["count"] * measured.stall_s)
    plan: dict[str, Any] = {
        "run": str(run_directory(config)),
        "data": task.describe_data(),
        "device": f"{device_name(runtime.device)} in {runtime.precision}",
        "model": {
            "name": config.model.name,
            "parameters": measured.parameters,
            "flops_per_item": measured.flops,
        }
        | {
            "flops": measured.flops and measured.flops * items,
            "items_per_parameter": items / measured.parameters,
        },
        "length": {
            "steps": steps,
            "epochs": steps / loader.steps_per_epoch,
            "items": items,
            "unit": task.unit,
        },
        "batch": {**batch, "items": loader.items_per_step},
        "memory": _memory(config, runtime, measured, ranks),
        "snapshots": snapshots,
        "time": {
            "step_s": step_s,
            "items_per_s": loader.items_per_step / step_s,
            "evaluations": evaluations,
        }
        | {"evaluation_s": evaluation_s, "training_s": seconds[0], "evaluations_s": seconds[1]}
        | {"snapshots_s": seconds[2], "total_s": sum(seconds)},
        "world_sizes": [_row(given, n) for n in sorted({*WORLD_SIZES, ranks})],
    }
    runtime.close()
    return plan | {"doubts": find_doubts(config, plan, os.cpu_count() or 1)}


def _at(config: Config, ranks: int) -> tuple[Config, dict[str, Any]]:
    """Return the configuration, and its batch and learning rate, on a number of ranks.

    Raises:
        ConfigError: it does not work there.
    """
    check_strategy(config, ranks)
    check_tensor_parallel(config)
    check_ranks(config.ddp, ranks)
    copies = ranks // config.ddp.tensor_parallel
    config = with_batch_size(config, copies, None)
    plan = plan_batches(config, copies)
    most = len(plan.indices_for_rank(0))
    return config, {
        "ranks": ranks,
        "copies": copies,
        "batch_size": plan.batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches": plan.n_micro,
        "micro_batches_per_rank": most,
        "idle": 1 - plan.n_micro / (most * copies),
        "lr": scale_lr(config.optimizer, plan.batch_size).lr,
    }


def _row(config: Config, ranks: int) -> dict[str, Any]:
    try:
        return _at(config, ranks)[1]
    except ConfigError as error:
        return {"ranks": ranks, "error": str(error.args[0])}


def _alone(config: Config) -> Config:
    """Return the configuration of one rank that trains as each of several does."""
    compiles = should_compile(config, resolve_device(config.trainer.device, "trainer.device"))
    ddp = replace(
        config.ddp, strategy="single", tensor_parallel=1, comm_hook="none", sync_batchnorm=False
    )
    trainer = replace(config.trainer, compile=compiles and config.trainer.compile)
    return replace(config, ddp=ddp, trainer=trainer)


def _measure(runtime: Runtime, task: Task, size: int) -> Measured:
    """Train and evaluate for some seconds, with steps of one micro-batch.

    Raises:
        ConfigError: there is too little memory.
    """
    task = copy.copy(task)
    split = task.split("val", runtime.device)
    assert split is not None
    trainer = replace(task.config.trainer, batch_size=size, micro_batch_size=size)
    task.config = replace(task.config, trainer=trainer)
    loader = task.train_loader(runtime.device)
    plan = plan_batches(task.config, 1)
    try:
        model, optimizer = build_model_and_optimizer(runtime, task, runtime.strategy)
        activations = _activations(runtime, task, model, loader.get_batch(1, plan, 0)[0].batch)
        micro_s, update_s = _time_steps(
            runtime, TrainStep(runtime, task, loader, plan, model, optimizer)
        )
        moments = [_now(runtime)]
        with eval_mode(model), torch.no_grad(), runtime.autocast():
            for batch in itertools.islice(split.batches(0, 1), EVALUATED):
                task.metrics(model, runtime.to_device(batch))
                moments.append(_now(runtime))
        evaluation_s = statistics.median(b - a for a, b in itertools.pairwise(moments)) * len(split)
        begin = _now(runtime)
        average = WeightAverage(model, task.config.trainer.ema).state().get("ema", {})
        states = {
            "weights": model_state(model),
            "optimizer": optimizer_state(model, optimizer),
            "average": average,
        }
        memory = {
            name: sum(t.to("cpu", copy=True).nbytes for t in state.values())
            for name, state in states.items()
        }
        stall_s = _now(runtime) - begin
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        raise ConfigError(
            f"a micro-batch of {size} does not fit into the memory here; lower "
            "trainer.micro_batch_size, or set "
            "trainer.activation_checkpointing=true"
        ) from error
    finally:
        loader.close()
    snapshot = sum(memory.values())
    counts = (count_parameters(model), flops_per_token(model))
    memory["gradients"] = sum(
        p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
    )
    memory["activations"] = activations
    return Measured(micro_s, update_s, evaluation_s, stall_s, *counts, memory, snapshot)


def _time_steps(runtime: Runtime, step: TrainStep) -> tuple[float, float]:
    """Return the median seconds of the passes and of the update."""
    step.warm_up()
    times: list[tuple[float, float]] = []
    deadline = _now(runtime) + MEASURED_S
    with progress_bar(runtime.group.env, MOST_STEPS, "measuring", "step") as bar:
        for number in range(1, MOST_STEPS + 1):
            begin = _now(runtime)
            step.forward_backward(number)
            middle = _now(runtime)
            step.clip_grad_norm()
            step.optimizer_step(number)
            times.append((middle - begin, _now(runtime) - middle))
            bar.update()
            if number > 2 and _now(runtime) > deadline:
                break
    passes, updates = zip(*times[1:], strict=True)  # the first allocates
    return statistics.median(passes), statistics.median(updates)


def _now(runtime: Runtime) -> float:
    """Return the time in seconds, once the device has done its work."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _activations(runtime: Runtime, task: Task, model: nn.Module, batch: Any) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, besides the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), runtime.autocast():
        # holds what is kept until the return
        losses = named_losses(task.loss(model, runtime.to_device(batch)))
    return sum(sizes.values()) if losses else 0


def _step_s(measured: Measured, batch: dict[str, Any]) -> float:
    return float(batch["micro_batches_per_rank"] * measured.micro_s + measured.update_s)


def _memory(config: Config, runtime: Runtime, measured: Measured, ranks: int) -> dict[str, int]:
    """Return the bytes of a rank by what takes them, their sum, and what is available."""
    parts = dict(measured.memory)
    strategy = config.ddp.strategy
    shards = ranks // 2 if strategy == "hsdp" else ranks  # of one machine
    for name in STATE:
        parts[name] //= (
            shards if name in DIVIDED.get(strategy, ()) else 1
        ) * config.ddp.tensor_parallel
    available = total_memory(runtime.devices) // (1 if runtime.device.type == "cuda" else ranks)
    return {**parts, "total": sum(parts.values()), "available": available}


def _snapshots(
    config: Config, measured: Measured, steps: int, step_s: float, steps_per_epoch: int
) -> dict[str, Any]:
    """Return size, number, interval and cost of the snapshots of a run, besides those of a lower
    validation loss.
    """
    saves, (write_s, free) = config.snapshot, _disk(config, measured.snapshot)
    seconds = [60 * saves.every_minutes] if saves.every_minutes else []
    if saves.every_steps == "auto":
        seconds.append(best_interval(measured.stall_s, 3600 * saves.mtbf_hours, write_s or 0.0))
    counts = [
        saves.every_steps,
        saves.keep_every,
        saves.every_epochs and saves.every_epochs * steps_per_epoch,
    ]
    intervals = [n for n in counts if isinstance(n, int)] + [
        max(1, round(s / step_s)) for s in seconds
    ]
    every = min([*intervals, steps])
    count = -(-steps // every)
    milestones = steps // saves.keep_every if saves.keep_every else 0
    kept = min(count, saves.keep_last + milestones) + saves.keep_best
    sizes = {
        "bytes": measured.snapshot,
        "kept": kept,
        "kept_bytes": kept * measured.snapshot,
        "free_bytes": free,
    }
    times = {"every_s": every * step_s, "stall_s": measured.stall_s, "write_s": write_s}
    return {**sizes, **times, "every_steps": every, "count": count}


def _disk(config: Config, size: int) -> tuple[float | None, int | None]:
    """Return the seconds to write a snapshot with its digest, and the free bytes; None for an
    object store.
    """
    path = config.snapshot.path or str(run_directory(config))
    if "://" in path:
        return None, None
    absolute = Path(path).absolute()
    directory = next(each for each in (absolute, *absolute.parents) if each.is_dir())
    content = os.urandom(min(size, WRITTEN))
    with suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:  # without a name
        begin = time.perf_counter()
        hashlib.sha256(content).digest()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return (time.perf_counter() - begin) * size / len(content), shutil.disk_usage(
            directory
        ).free
    return None, None
