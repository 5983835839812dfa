"""Plan a run before it is trained, as JSON values: counts, bytes and seconds.

The table of strategies comes from formulas (sizes.py, strategies.py). A plan for this machine also
measures some steps (measured.py). A plan for other GPUs needs neither those GPUs nor memory for the
model.
"""

import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.job import Job
from mingpt_ddp.config.validation import check
from mingpt_ddp.data.dataloader import Loader, SupportsResidence, with_batch_size
from mingpt_ddp.distributed.device.compile import allows_compile, should_compile
from mingpt_ddp.distributed.device.device import device_name, total_memory
from mingpt_ddp.distributed.device.machine import threads_per_worker
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.single import for_one_rank
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.gpus import GPUS, Machine
from mingpt_ddp.metrics.mfu import peak_flops_of, vendor_peak_flops
from mingpt_ddp.models.ops import DTYPES, resolve_device
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.read.load import snapshot_to_resume
from mingpt_ddp.snapshots.read.warm_start import WarmStart, warm_start
from mingpt_ddp.study.planning.batch import BatchOnRanks, divide_batch, ranks_row
from mingpt_ddp.study.planning.doubts import find_doubts
from mingpt_ddp.study.planning.measured import Measured, measure
from mingpt_ddp.study.planning.sizes import Sizes, gpu_precision, sizes_of
from mingpt_ddp.study.planning.strategies import STRATEGIES, Devices, Footprint
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import check_minutes, known_length
from mingpt_ddp.training.start.stages import snapshot_store

WORLD_SIZES = (1, 2, 4, 8)  # numbers of ranks for which a plan divides the batch


def make_plan(
    job: Job,
    machine: Machine | None = None,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """Plan a run. The only files that this writes are the cache of the data.

    Args:
        job: The run to plan.
        machine: GPUs to plan for. None for this machine, where one rank trains some steps and
            measures them.
        vocab_size: Replaces the size of the text's own vocabulary.

    Raises:
        UserError: Training would refuse the configuration, or the user's code reads values of
            tensors, which have none on the meta device.
    """
    config = job.config
    group = ProcessGroup(DistEnv(), for_one_rank(config.ddp), job=0)
    runtime = None
    if machine is None:
        runtime = Runtime(_for_one_rank(config), DistEnv())
        devices = _devices_of_this_machine(config, runtime)
    else:
        devices = _devices_of_machine(config, machine)
    warm = _warm_start(job, group)
    batch = divide_batch(warm.config, devices.ranks)
    config = with_batch_size(warm.config, batch.copies, None)
    task = build_task(_for_one_rank(config) if runtime else config, group, warm.initial_state)
    with task.discarded_if_refused():
        if vocab_size is None:
            warm.check(task.build_model, task.shape)
        else:
            task.set_outputs(vocab_size)
        check_minutes(config)
        loader = task.train_loader(torch.device("cpu"))
        loader.close()
        measured = measure(runtime, task, batch) if runtime else None
        length = known_length(config, loader.steps_per_epoch, measured.step_s if measured else None)
    sizes = _sizes(task, devices.precision, may_use_memory=machine is None)
    items = length.steps * loader.items_per_step
    plan: dict[str, Any] = {
        "run": str(job.directory),
        "data": task.describe_data() + (f"; {vocab_size:,} outputs" if vocab_size else ""),
        "device": f"{devices.ranks} x {devices.name} in {devices.precision}",
        "memory_bytes": devices.memory,
        "model": {
            "name": config.model.name,
            "parameters": sizes.trained,
            "flops_per_item": sizes.flops_per_item,
            "flops": sizes.flops_per_item and sizes.flops_per_item * items,
            "items_per_parameter": items / sizes.trained,
        },
        "length": {
            "steps": length.steps,
            "epochs": length.steps / loader.steps_per_epoch,
            "items": items,
            "unit": task.unit,
            "limits": length.limits,
        },
        "batch": {**asdict(batch), "items": loader.items_per_step},
        "strategies": _strategies(config, sizes, devices, loader),
        "snapshots": _snapshots(config, sizes, length.steps, job.directory),
        "world_sizes": [ranks_row(warm.config, ranks) for ranks in WORLD_SIZES],
        "measured": None,
    }
    if runtime and measured:
        runtime.close()
        plan["measured"] = _measured_times(config, measured, batch, plan["length"])
        peak_flops = vendor_peak_flops(runtime.device, runtime.dtype)
        if sizes.flops_per_item and peak_flops:
            flops = sizes.flops_per_item * measured.items_per_s
            plan["measured"]["mfu"] = flops / peak_flops
    plan["doubts"] = find_doubts(config, plan, os.cpu_count() or 1)
    return plan


def _devices_of_machine(config: Config, machine: Machine) -> Devices:
    gpu = GPUS[machine.device]
    precision = gpu_precision(config.trainer.precision)
    return Devices(
        name=gpu.name,
        precision=precision,
        nodes=machine.nodes,
        ranks_per_node=config.ddp.ranks_here,
        memory=gpu.memory,
        is_gpu=True,
        peak_flops=peak_flops_of(gpu.name, DTYPES[precision]),
        link=gpu.link,
        network=machine.network_gbps * 1e9 / 8,
    )


def _devices_of_this_machine(config: Config, runtime: Runtime) -> Devices:
    ranks = config.ddp.ranks_here
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_worker(ranks))
    memory = total_memory(runtime.device)
    is_gpu = runtime.device.type == "cuda"
    return Devices(
        name=device_name(runtime.device),
        precision=runtime.precision,
        nodes=1,
        ranks_per_node=ranks,
        memory=memory if is_gpu else memory // ranks,
        is_gpu=is_gpu,
        peak_flops=vendor_peak_flops(runtime.device, runtime.dtype),
    )


def _for_one_rank(config: Config) -> Config:
    """Return a configuration for one rank that trains alone.

    The rank compiles its model only if each of the configured ranks would compile it.
    """
    device = resolve_device(config.trainer.device, "trainer.device")
    compiles = should_compile(config, device, config.ddp.ranks_here)
    trainer = replace(config.trainer, compile=compiles and config.trainer.compile)
    return replace(config, ddp=for_one_rank(config.ddp), trainer=trainer)


def _warm_start(job: Job, group: ProcessGroup) -> WarmStart:
    """Find the weights that the run would start from, unless it starts from random weights."""
    config = job.config
    newest = None
    if config.run.init_from is not None:
        directory = job.directory
        newest = snapshot_to_resume(snapshot_store(config, directory), directory, config.run.source)
    return warm_start(config, newest and newest.state, job.command_line_keys, group)


def _sizes(task: Task, precision: str, may_use_memory: bool) -> Sizes:
    try:
        return sizes_of(task, precision)
    except ConfigError:
        if not may_use_memory:
            raise
        # On the CPU, the user's code can read the values of tensors.
        return sizes_of(task, precision, "cpu")


def _strategies(
    config: Config, sizes: Sizes, devices: Devices, loader: Loader
) -> dict[str, dict[str, Any]]:
    """Compute the memory, messages and step time of each strategy, for the table of strategies.

    Returns:
        By name of the strategy, the result of `Footprint.figures`, or the reason why it cannot run.

    Raises:
        ConfigError: The strategy that the configuration asks for cannot run.
    """
    chosen = "tensor_parallel" if config.ddp.tensor_parallel > 1 else config.ddp.strategy
    data_bytes = 0
    if devices.is_gpu and isinstance(loader, SupportsResidence):
        data_bytes = loader.resident_bytes(devices.memory)
    table: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES if devices.ranks > 1 else STRATEGIES[:1]:
        try:
            candidate = _with_strategy(config, name, devices.ranks_per_node)
            if devices.is_gpu:
                allows_compile(candidate, torch.device("cuda"), devices.ranks)
            batch = divide_batch(candidate, devices.ranks)
            items = loader.items_per_step * batch.micro_batches_per_rank / batch.micro_batches
            footprint = Footprint(name, candidate, sizes, devices, batch, items, data_bytes)
            table[name] = footprint.figures()
        except ConfigError as error:
            if name == chosen:
                raise
            table[name] = {"reason": str(error.args[0])}
    return table


def _with_strategy(config: Config, name: str, ranks_per_node: int) -> Config:
    """Return the configuration with its strategy replaced.

    Args:
        name: The strategy, one of STRATEGIES.

    Raises:
        ConfigError: Tensor parallelism cannot divide the heads of the model.
    """
    ranks_per_copy = 1
    strategy: Any = name  # the value of ddp.strategy
    if name == "tensor_parallel":
        strategy = "auto"
        heads = getattr(config.model, "n_head", 0)
        ranks_per_copy = config.ddp.tensor_parallel
        ranks_per_copy = ranks_per_copy if ranks_per_copy > 1 else math.gcd(heads, ranks_per_node)
        check(
            ranks_per_copy > 1,
            f"model.n_head={heads} and the {ranks_per_node} ranks of a node have no common divisor "
            "above 1",
        )
    return replace(
        config, ddp=replace(config.ddp, strategy=strategy, tensor_parallel=ranks_per_copy)
    )


def _snapshots(config: Config, sizes: Sizes, steps: int, directory: Path) -> dict[str, Any]:
    """Compute the size of a snapshot, and of all snapshots that the run keeps on the disk."""
    snapshot = config.snapshot
    size = sizes.snapshot_bytes(config.trainer.ema is not None)
    milestones = steps // snapshot.keep_every if snapshot.keep_every else 0
    kept = snapshot.keep_last + milestones + snapshot.keep_best
    location = snapshot.path or str(directory)
    free = None
    if "://" not in location:
        absolute = Path(location).absolute()
        existing = next(each for each in (absolute, *absolute.parents) if each.is_dir())
        free = shutil.disk_usage(existing).free
    return {"bytes": size, "kept": kept, "kept_bytes": kept * size, "free_bytes": free}


def _measured_times(
    config: Config, measured: Measured, batch: BatchOnRanks, length: dict[str, Any]
) -> dict[str, Any]:
    steps = length["steps"]
    evaluations = math.ceil(steps / (config.trainer.eval_every or steps))
    evaluation_s = measured.evaluation_s / batch.copies
    training_s = steps * measured.step_s
    return {
        "step_s": measured.step_s,
        "items_per_s": length["items"] / training_s,
        "mfu": None,
        "peak_bytes": measured.peak_bytes,
        "training_s": training_s,
        "evaluations": evaluations,
        "evaluation_s": evaluation_s,
        "evaluations_s": evaluations * evaluation_s,
        "total_s": training_s + evaluations * evaluation_s,
    }
