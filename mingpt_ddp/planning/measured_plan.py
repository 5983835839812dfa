"""What a configuration means, without training it.

Sizes are those of the model and the data; times are those of a few steps here.
"""

import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import DDPConfig, SnapshotConfig
from mingpt_ddp.data.dataloader import Loader, plan_batches
from mingpt_ddp.distributed.device.compile import should_compile
from mingpt_ddp.distributed.device.device import device_name, total_memory
from mingpt_ddp.distributed.device.machine import threads_per_worker
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.group.process_group import check_ranks
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies import check_strategy
from mingpt_ddp.distributed.strategies.base import DIVIDED, STATE
from mingpt_ddp.distributed.strategies.single import for_one_rank
from mingpt_ddp.distributed.strategies.tensor_split import check_tensor_parallel
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.ops import resolve_device
from mingpt_ddp.optim.lr_schedule import scale_lr
from mingpt_ddp.planning.doubts import find_doubts
from mingpt_ddp.planning.measure import Measured, measure_training
from mingpt_ddp.storage.run_directory import run_directory
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import RunLength, check_minutes, known_length
from mingpt_ddp.training.saves.save_schedule import automatic_interval
from mingpt_ddp.training.start.first_checks import newest_snapshot, with_batch_size
from mingpt_ddp.training.start.stages import snapshot_store
from mingpt_ddp.training.start.warm_start import WarmStart, warm_start

WRITTEN = 1 << 25  # bytes, to measure a disk
WORLD_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class BatchOnRanks:
    """How a number of ranks divides the batch, and the learning rate there."""

    ranks: int
    copies: int  # of the model
    batch_size: int
    micro_batch_size: int
    micro_batches: int
    micro_batches_per_rank: int  # of the rank that has most
    idle: float  # share of the time that ranks wait for it
    lr: float


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
    warm = warm_start_of_plan(config, typed, runtime)
    batch = divide_batch(warm.config, ranks)
    config = with_batch_size(warm.config, batch.copies, None)
    task = build_task(_alone(config), runtime.group, warm.state)
    with task.discarded_if_refused():
        warm.check(task)
        check_minutes(task.config)
        loader = task.train_loader(runtime.device)
    loader.close()
    measured = measure_training(runtime, task, batch.micro_batch_size)
    step_s = batch.micro_batches_per_rank * measured.micro_s + measured.update_s
    length = known_length(task.config, loader.steps_per_epoch, step_s)
    work = describe_work(task, loader, length, measured.parameters, measured.flops)
    steps = length.steps
    directory = run_directory(config)
    snapshots = _snapshots(config.snapshot, directory, measured, length, step_s)
    plan: dict[str, Any] = {
        "run": str(directory),
        "data": task.describe_data(),
        "device": f"{device_name(runtime.device)} in {runtime.precision}",
        **work,
        "batch": {**asdict(batch), "items": loader.items_per_step},
        "memory": _memory(config.ddp, runtime, measured, ranks),
        "snapshots": snapshots,
        "time": {
            "step_s": step_s,
            "items_per_s": loader.items_per_step / step_s,
            **_totals(
                config.trainer.eval_every, measured, batch, steps, step_s, snapshots["count"]
            ),
        },
        "world_sizes": [ranks_row(warm.config, n) for n in sorted({*WORLD_SIZES, ranks})],
    }
    runtime.close()
    plan["doubts"] = find_doubts(config, plan, os.cpu_count() or 1)
    return plan


def warm_start_of_plan(config: Config, typed: Container[str], runtime: Runtime) -> WarmStart:
    """Return the weights that the run would start from, if any.

    Args:
        typed: the keys that the command line sets.
    """
    newest = None
    if config.run.init_from is not None:
        directory = run_directory(config)
        store = snapshot_store(config, directory)
        newest = newest_snapshot(store, directory, config.run.source)
    return warm_start(config, newest and newest.state, typed, runtime.group)


def describe_work(
    task: Task, loader: Loader, length: RunLength, parameters: int, flops: float | None
) -> dict[str, dict[str, Any]]:
    """Return the size of the model, and its work in a run; the length of the run.

    Args:
        parameters: a number.
        flops: per item.
    """
    steps = length.steps
    items = steps * loader.items_per_step
    model = {
        "name": task.config.model.name,
        "parameters": parameters,
        "flops_per_item": flops,
        "flops": flops and flops * items,
        "items_per_parameter": items / parameters,
    }
    epochs = steps / loader.steps_per_epoch
    described = {"steps": steps, "epochs": epochs, "items": items, "unit": task.unit}
    return {"model": model, "length": {**described, "limits": length.limits}}


def _totals(
    eval_every: int | None,
    measured: Measured,
    batch: BatchOnRanks,
    steps: int,
    step_s: float,
    snapshots: int,
) -> dict[str, Any]:
    """Return the seconds of a run by what takes them.

    Args:
        snapshots: a number.
    """
    evaluations = math.ceil(steps / (eval_every or steps))
    evaluation_s = measured.evaluation_s / batch.copies
    training_s = steps * step_s
    evaluations_s = evaluations * evaluation_s
    snapshots_s = snapshots * measured.stall_s
    return {
        "evaluations": evaluations,
        "evaluation_s": evaluation_s,
        "training_s": training_s,
        "evaluations_s": evaluations_s,
        "snapshots_s": snapshots_s,
        "total_s": training_s + evaluations_s + snapshots_s,
    }


def divide_batch(config: Config, ranks: int) -> BatchOnRanks:
    """Return how a number of ranks divides the batch.

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
    return BatchOnRanks(
        ranks=ranks,
        copies=copies,
        batch_size=plan.batch_size,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.n_micro,
        micro_batches_per_rank=most,
        idle=1 - plan.n_micro / (most * copies),
        lr=scale_lr(config.optimizer, plan.batch_size).lr,
    )


def ranks_row(config: Config, ranks: int) -> dict[str, Any]:
    try:
        return asdict(divide_batch(config, ranks))
    except ConfigError as error:
        return {"ranks": ranks, "error": str(error.args[0])}


def _alone(config: Config) -> Config:
    """Return the configuration of one rank that trains as each of several does."""
    device = resolve_device(config.trainer.device, "trainer.device")
    compiles = should_compile(config, device, config.ddp.local_workers or 1)
    trainer = replace(config.trainer, compile=compiles and config.trainer.compile)
    return replace(config, ddp=for_one_rank(config.ddp), trainer=trainer)


def _memory(ddp: DDPConfig, runtime: Runtime, measured: Measured, ranks: int) -> dict[str, int]:
    """Return the bytes of a rank by what takes them, their sum, and what is available."""
    parts = dict(measured.memory)
    shards = ranks // 2 if ddp.strategy == "hsdp" else ranks  # of one machine
    for name in STATE:
        parts[name] //= ddp.tensor_parallel
        if name in DIVIDED.get(ddp.strategy, ()):
            parts[name] //= shards
    available = total_memory(runtime.device)
    if runtime.device.type != "cuda":
        available //= ranks
    return {**parts, "total": sum(parts.values()), "available": available}


def _snapshots(
    snapshot: SnapshotConfig,
    directory: Path,
    measured: Measured,
    length: RunLength,
    step_s: float,
) -> dict[str, Any]:
    """Return size, number, interval and cost of the snapshots of a run.

    Those of a lower validation loss are left out.

    Args:
        directory: of the run.
    """
    steps = length.steps
    write_s, free = _disk(snapshot.path or str(directory), measured.snapshot)
    every = _save_interval(snapshot, measured, write_s, step_s, length.steps_per_epoch)
    every = min(every, steps)
    count = math.ceil(steps / every)
    milestones = steps // snapshot.keep_every if snapshot.keep_every else 0
    kept = min(count, snapshot.keep_last + milestones) + snapshot.keep_best
    return {
        "bytes": measured.snapshot,
        "kept": kept,
        "kept_bytes": kept * measured.snapshot,
        "free_bytes": free,
        "every_s": every * step_s,
        "stall_s": measured.stall_s,
        "write_s": write_s,
        "every_steps": every,
        "count": count,
    }


def _save_interval(
    snapshot: SnapshotConfig,
    measured: Measured,
    write_s: float | None,
    step_s: float,
    steps_per_epoch: int,
) -> float:
    """Return the steps between two snapshots; infinity without any before the end."""
    intervals: list[float] = [math.inf]
    if isinstance(snapshot.every_steps, int):
        intervals.append(snapshot.every_steps)
    if snapshot.keep_every is not None:
        intervals.append(snapshot.keep_every)
    if snapshot.every_epochs:
        intervals.append(snapshot.every_epochs * steps_per_epoch)
    seconds = []
    if snapshot.every_minutes:
        seconds.append(60 * snapshot.every_minutes)
    if snapshot.every_steps == "auto":
        mtbf_s = 3600 * snapshot.mtbf_hours
        seconds.append(automatic_interval(measured.stall_s, mtbf_s, write_s or 0.0))
    for each in seconds:
        intervals.append(max(1, round(each / step_s)))
    return min(intervals)


def _disk(path: str, size: int) -> tuple[float | None, int | None]:
    """Return the seconds to write a snapshot with its digest, and the free bytes.

    Both are None for an object store.
    """
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
        seconds = time.perf_counter() - begin
        return seconds * size / len(content), shutil.disk_usage(directory).free
    return None, None
