"""What a configuration needs of GPUs that this machine does not have, for every strategy.

Memory comes from a step that is simulated without data, traffic from the strategies' own
arithmetic, and the bound of the time from data sheets. Nothing is measured.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Container
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import check
from mingpt_ddp.data.dataloader import Loader, SupportsResidence
from mingpt_ddp.distributed.cluster import Cluster
from mingpt_ddp.distributed.compile import allows_compile
from mingpt_ddp.distributed.logs import progress_bar
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.step_memory import ParameterSize, StepMemory, TensorSize, on_the_line
from mingpt_ddp.distributed.strategies.footprint import (
    FOOTPRINTS,
    Footprint,
    StepWork,
    TensorParallelFootprint,
)
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.gpus import GPUS, Machine
from mingpt_ddp.metrics.peak_flops import peak_flops_of
from mingpt_ddp.models import count_parameters, flops_per_token
from mingpt_ddp.planning.doubts import find_doubts
from mingpt_ddp.planning.plan import (
    WORLD_SIZES,
    BatchOnRanks,
    describe_length,
    describe_model,
    divide_batch,
    ranks_row,
    warm_start_of_plan,
)
from mingpt_ddp.storage.run_dir import run_directory
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.simulated_step import (
    MICRO_BATCHES,
    precision_of_gpu,
    runtime_without_data,
    simulate,
)
from mingpt_ddp.training.warm_start import WarmStart

ROWS = (2, 3)  # of the micro-batches that are simulated; others lie on a line with them
CONTEXT = 1 << 29  # bytes that CUDA and its libraries take, about
MOST_ROWS = 1 << 20  # of a micro-batch
GIB = 2**30
Simulated: TypeAlias = tuple[StepMemory, list[ParameterSize]]
LEFT_OUT = (
    "in the memory: fragmentation, NCCL's buffers, and what kernels allocate for themselves; leave "
    "some GiB free",
    "in the memory: torch.compile, which keeps less",
    "in the least step: everything but products at the vendor's peak, the state that is read and "
    "written once, and what is sent; switches that add up (NVLink SHARP) may send less",
)
LEFT_OUT_OF_CANONICAL = (
    "ddp.reduction=canonical: up to two more copies of the gradients in the memory, and the "
    "gradients of every micro-batch on the wire",
)


class Simulations:
    """Simulated steps of one configuration: those of two sizes give the memory of all others."""

    def __init__(self, task: Task, runtime: Runtime, loader: Loader) -> None:
        self.task = task
        self.runtime = runtime
        self.loader = loader
        self.bar = progress_bar(runtime.group.env, 3 * len(ROWS), "simulating", "step")
        self._done: dict[tuple[Any, ...], Simulated] = {}

    def step(self, strategy: type[Footprint], rows: int, passes: int, parts: int) -> Simulated:
        """Return the memory of a step and the sizes of its state, as the strategy computes them.

        Args:
            rows: sequences of a micro-batch.
            passes: forward and backward passes of a step.
            parts: ranks that hold a copy of the model together.
        """
        (few, sizes), (more, _) = (self._simulate(strategy, n, passes, parts) for n in ROWS)
        try:
            return on_the_line((ROWS[0], few), (ROWS[1], more), rows), sizes
        except ValueError:  # of a user's model, which allocates otherwise at another size
            return self._simulate(strategy, rows, passes, parts)

    def _simulate(self, strategy: type[Footprint], rows: int, passes: int, parts: int) -> Simulated:
        passes = 1 if strategy.reduces_each_pass else min(passes, MICRO_BATCHES)
        key = (rows, passes, parts, strategy.prepare)
        if key not in self._done:
            prepare = partial(strategy.prepare, dtype=self.runtime.dtype, parts=parts)
            self._done[key] = simulate(self.task, self.runtime, self.loader, rows, passes, prepare)
            self.bar.update()
        return self._done[key]


class GPUPlan:
    """The figures of one configuration on some GPUs."""

    def __init__(
        self, simulations: Simulations, config: Config, cluster: Cluster, machine: Machine
    ) -> None:
        """
        Args:
            config: of the run.
        """
        self.simulations = simulations
        self.task = simulations.task
        self.config = config
        self.cluster = cluster
        self.gpu = GPUS[machine.device]
        with torch.device("meta"):  # allocates nothing
            model = self.task.build_model()
        self.parameters = count_parameters(model)
        self.flops_per_item = flops_per_token(model)
        loader = simulations.loader
        self.data = 0  # bytes that stay on the GPU
        if isinstance(loader, SupportsResidence):
            self.data = loader.resident_bytes(self.gpu.memory)

    def of(self, strategy: type[Footprint]) -> dict[str, Any]:
        """Return the figures of a strategy; None for each, and the reason, if it cannot run."""
        try:
            parts = self._parts(strategy)
            batch = self._divide(strategy, parts)
            rows = batch.micro_batch_size
            passes = batch.micro_batches_per_rank
            step = partial(self.simulations.step, strategy, passes=passes, parts=parts)
            memory, sizes = step(rows)
            footprint = strategy(sizes, self.cluster, self._work(rows, passes, parts))
        except ConfigError as error:
            if not self._is_chosen(strategy):
                return {**dict.fromkeys(FIGURES), "reason": str(error.args[0])}
            raise

        def needed(memory: StepMemory) -> int:
            return sum(footprint.peak(memory).values()) + self.data + CONTEXT

        peak = {**footprint.peak(memory), "data": self.data}
        operations = passes * memory.operations
        times = self._times(footprint, operations)
        reason = None
        if needed(memory) > self.gpu.memory:
            reason = (
                f"needs {needed(memory) / GIB:.1f} GiB with CUDA's own, "
                f"a GPU has {self.gpu.memory / GIB:.1f}"
            )
        return {
            "peak_bytes": sum(peak.values()),
            **{f"{kind}_bytes": size for kind, size in peak.items()},
            "micro_batch_size": rows,
            "passes": passes,
            "ranks_per_copy": parts,
            "largest_micro_batch_size": _largest(lambda n: needed(step(n)[0]) <= self.gpu.memory),
            "wire_bytes_per_step": footprint.traffic().sent,
            "flops_per_step": operations,
            **times,
            "step_s_bound": None if reason else max(times.values()),
            "reason": reason,
        }

    def _is_chosen(self, strategy: type[Footprint]) -> bool:
        """Return whether the configuration asks for this strategy."""
        if self.config.ddp.tensor_parallel > 1:
            return strategy is TensorParallelFootprint
        return self.config.ddp.strategy == strategy.name

    def _parts(self, strategy: type[Footprint]) -> int:
        """Return the ranks that hold a copy of the model together.

        Raises:
            ConfigError: there is no such number.
        """
        if strategy is not TensorParallelFootprint:
            return 1
        own = self.config.ddp.tensor_parallel
        if own > 1:
            return own
        heads = getattr(self.config.model, "n_head", 0)  # without any, any number is refused
        parts = math.gcd(heads, self.cluster.ranks_per_node)
        message = f"no number of ranks of a node divides model.n_head={heads}; change it"
        check(parts > 1 or self.cluster.ranks == 1, message)
        return parts

    def _divide(self, strategy: type[Footprint], parts: int) -> BatchOnRanks:
        """Return how the batch is divided.

        Raises:
            ConfigError: the strategy does not work.
        """
        is_alone = self.cluster.ranks == 1 and strategy is not Footprint
        check(not is_alone, "on one rank it is single")
        ddp = replace(self.config.ddp, strategy=strategy.key, tensor_parallel=parts)
        config = replace(self.config, ddp=ddp)
        allows_compile(config, torch.device("cuda"), self.cluster.ranks)
        return divide_batch(config, self.cluster.ranks)[1]

    def _work(self, rows: int, passes: int, parts: int) -> StepWork:
        width = getattr(self.config.model, "n_embd", 0)
        length = getattr(self.config.data, "block_size", 1)
        itemsize = self.simulations.runtime.dtype.itemsize
        return StepWork(
            passes=passes,
            activations=TensorSize((rows, length, width), itemsize),
            recomputes=self.config.trainer.activation_checkpointing,
            comm_hook=self.config.ddp.comm_hook,
            tensor_parallel=parts,
        )

    def _times(self, footprint: Footprint, operations: int) -> dict[str, float]:
        """Return the least seconds of the products, of the memory and of the wire in a step.

        Each pass reads the weights twice, and each step reads and writes the state. What else
        crosses the memory depends on how operations are fused.
        """
        dtype = self.simulations.runtime.dtype
        peak = peak_flops_of(self.gpu.name, dtype)
        assert peak is not None
        weights = sum(each.numel for each in footprint.parameters) * dtype.itemsize
        state = footprint.weights() + footprint.optimizer() + footprint.average()
        moved = 2 * footprint.work.passes * weights + 2 * state
        return {
            "compute_s": operations / peak,
            "memory_s": moved / self.gpu.bandwidth,
            "wire_s": footprint.traffic().seconds,
        }


FIGURES = (
    *("peak_bytes", "weights_bytes", "gradients_bytes", "optimizer_bytes", "average_bytes"),
    *("activations_bytes", "temporaries_bytes", "gathered_bytes", "data_bytes"),
    *("micro_batch_size", "passes", "ranks_per_copy", "largest_micro_batch_size"),
    *("wire_bytes_per_step", "flops_per_step", "compute_s", "memory_s", "wire_s", "step_s_bound"),
)


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number of rows that fits, at most MOST_ROWS; 0 if one does not."""
    return bisect_left(range(1, MOST_ROWS + 1), True, key=lambda rows: not fits(rows))


def _simulations(
    config: Config, runtime: Runtime, warm: WarmStart | None, outputs: int | None
) -> Simulations:
    """Read the data on this machine, of which nothing else of the run is asked."""
    trainer = replace(config.trainer, device="cpu", compile=False)
    task = build_task(replace(config, trainer=trainer), runtime.group, warm.state if warm else {})
    if outputs is not None:
        task.set_outputs(outputs)
    with task.discarded_if_refused():
        if warm and outputs is None:
            warm.check(task)
        loader = task.train_loader(runtime.device)
    return Simulations(task, runtime, loader)


def make_gpu_plan(
    config: Config, machine: Machine, typed: Container[str] = (), outputs: int | None = None
) -> dict[str, Any]:
    """Return what a configuration means and needs on other GPUs, as JSON values.

    Args:
        typed: the keys that the command line sets.
        outputs: of the model, instead of those that the data needs.

    Raises:
        UserError: training would refuse the configuration too, or it has several GPUs a rank.
    """
    gpu = GPUS[machine.device]
    network = machine.network_gbps * 1e9 / 8
    cluster = Cluster(machine.nodes, config.ddp.local_workers or 1, gpu.link, network)
    runtime = runtime_without_data(config)
    warm = warm_start_of_plan(config, typed, runtime)
    given = warm.config if warm else config
    config, batch = divide_batch(given, cluster.ranks)
    allows_compile(config, torch.device("cuda"), cluster.ranks)
    simulations = _simulations(config, runtime, warm, outputs)
    task = simulations.task
    loader = simulations.loader
    plan = GPUPlan(simulations, config, cluster, machine)
    with simulations.bar:
        # what fails here fails for every strategy
        simulations.step(Footprint, batch.micro_batch_size, batch.micro_batches_per_rank, parts=1)
        strategies = {strategy.name: plan.of(strategy) for strategy in FOOTPRINTS}
    loader.close()
    runtime.close()
    length = describe_length(config, task, loader)
    data = task.describe_data()
    if outputs is not None:
        data += f"; the model has {outputs:,} outputs"
    is_canonical = config.ddp.reduction == "canonical"
    described: dict[str, Any] = {
        "run": str(run_directory(config)),
        "data": data,
        "device": f"{cluster.ranks} x {gpu.name} in {precision_of_gpu(config)}",
        "model": describe_model(config, plan.parameters, plan.flops_per_item, length["items"]),
        "length": length,
        "batch": {**asdict(batch), "items": loader.items_per_step},
        "gpu": {
            "device": machine.device,
            "ranks": cluster.ranks,
            "nodes": cluster.nodes,
            "memory_bytes": gpu.memory,
            "link_bytes_per_s": gpu.link,
            "network_bytes_per_s": network if machine.nodes > 1 else None,
            "strategies": strategies,
            "left_out": LEFT_OUT + LEFT_OUT_OF_CANONICAL * is_canonical,
        },
        "world_sizes": [ranks_row(given, n) for n in sorted({*WORLD_SIZES, cluster.ranks})],
    }
    described["doubts"] = find_doubts(config, described, os.cpu_count() or 1)
    return described
