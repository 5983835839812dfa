"""What a configuration needs of GPUs that this machine does not have, for every strategy.

Nothing is measured: memory and traffic come from formulas (sizing.py,
strategy_formulas.py), and the bound of the time from data sheets.
"""

import math
import os
from collections.abc import Container
from dataclasses import asdict, replace
from typing import Any

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import check
from mingpt_ddp.data.dataloader import Loader, SupportsResidence
from mingpt_ddp.distributed.device.compile import allows_compile
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.single import for_one_rank
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.gpus import GPUS, Machine
from mingpt_ddp.metrics.mfu import peak_flops_of
from mingpt_ddp.models import count_parameters, flops_per_token
from mingpt_ddp.planning.cluster import Cluster
from mingpt_ddp.planning.doubts import find_doubts
from mingpt_ddp.planning.measured_plan import (
    WORLD_SIZES,
    BatchOnRanks,
    describe_work,
    divide_batch,
    ranks_row,
    warm_start_of_plan,
)
from mingpt_ddp.planning.state_shapes import State, precision_of_gpu
from mingpt_ddp.planning.strategy_formulas import STRATEGIES, Footprint, Strategy
from mingpt_ddp.storage.run_directory import run_directory
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import known_length
from mingpt_ddp.training.start.first_checks import with_batch_size

CONTEXT = 1 << 29  # bytes that CUDA and its libraries take, about
GIB = 2**30
LEFT_OUT = (
    "in the memory: fragmentation, NCCL's buffers, and what kernels allocate for themselves; leave "
    "some GiB free",
    "in the memory: torch.compile, which keeps less",
    "in the least step: everything but products at the vendor's peak, the state that is read and "
    "written once, and what is sent; switches that add up (NVLink SHARP) may send less",
)
LEFT_OUT_OF_OWN_CODE = (
    "activations, and what the passes allocate for a moment: not known of a model or task of your "
    "own; try a step"
)
LEFT_OUT_OF_CANONICAL = (
    "ddp.reduction=canonical: up to two more copies of the gradients in the memory, and the "
    "gradients of every micro-batch on the wire"
)

FIGURES = (
    *("peak_bytes", "weights_bytes", "gradients_bytes", "optimizer_bytes", "average_bytes"),
    *("activations_bytes", "temporaries_bytes", "gathered_bytes", "data_bytes"),
    *("micro_batch_size", "passes", "ranks_per_copy", "largest_micro_batch_size"),
    *("wire_bytes_per_step", "flops_per_step", "compute_s", "memory_s", "wire_s", "step_s_bound"),
)
# Figures that are unknown of a user's model.
UNKNOWN = ("peak_bytes", "activations_bytes", "temporaries_bytes", "largest_micro_batch_size")


class GPUPlan:
    """The figures of one configuration on some GPUs."""

    def __init__(self, task: Task, loader: Loader, cluster: Cluster, machine: Machine) -> None:
        self.task = task
        self.cluster = cluster
        self.gpu = GPUS[machine.device]
        self.whole = State(task)
        self.items_per_row = loader.items_per_step / task.config.trainer.batch_size
        self.data = 0  # bytes that stay on the GPU
        if isinstance(loader, SupportsResidence):
            self.data = loader.resident_bytes(self.gpu.memory)

    def figures(self, strategy: Strategy) -> dict[str, Any]:
        """Return the figures of a strategy; None for each, and the reason, if it cannot run."""
        try:
            parts = self._ranks_per_copy(strategy)
            batch = self._divide(strategy, parts)
            state = State(self.task, parts) if parts > 1 else self.whole
            footprint = Footprint(strategy, state, self.cluster, batch)
        except ConfigError as error:
            if not self._is_chosen(strategy):
                return {**dict.fromkeys(FIGURES), "reason": str(error.args[0])}
            raise
        peak = {**footprint.peak(), "data": self.data}
        needed = sum(peak.values()) + CONTEXT
        operations = self._operations(footprint)
        times = self._times(footprint, operations)
        reason = None
        if needed > self.gpu.memory:
            reason = (
                f"needs {needed / GIB:.1f} GiB with CUDA's own, "
                f"a GPU has {self.gpu.memory / GIB:.1f}"
            )
        figures = {
            "peak_bytes": sum(peak.values()),
            **{f"{kind}_bytes": size for kind, size in peak.items()},
            "micro_batch_size": batch.micro_batch_size,
            "passes": batch.micro_batches_per_rank,
            "ranks_per_copy": parts,
            "largest_micro_batch_size": footprint.largest(self.gpu.memory - self.data - CONTEXT),
            "wire_bytes_per_step": footprint.traffic().sent,
            "flops_per_step": operations,
            **times,
            "step_s_bound": None if reason else max(filter(None, times.values())),
            "reason": reason,
        }
        if footprint.activations is None:
            figures |= dict.fromkeys(UNKNOWN)
        return figures

    def _is_chosen(self, strategy: Strategy) -> bool:
        """Return whether the configuration asks for this strategy."""
        ddp = self.task.config.ddp
        return strategy.name == ("tensor_parallel" if ddp.tensor_parallel > 1 else ddp.strategy)

    def _ranks_per_copy(self, strategy: Strategy) -> int:
        """Return the ranks that hold a copy of the model together.

        Raises:
            ConfigError: there is no such number.
        """
        if strategy.name != "tensor_parallel":
            return 1
        chosen = self.task.config.ddp.tensor_parallel
        if chosen > 1:
            return chosen
        heads = getattr(self.task.config.model, "n_head", 0)  # without any, any number is refused
        parts = math.gcd(heads, self.cluster.ranks_per_node)
        message = f"no number of ranks of a node divides model.n_head={heads}; change it"
        check(parts > 1 or self.cluster.ranks == 1, message)
        return parts

    def _divide(self, strategy: Strategy, parts: int) -> BatchOnRanks:
        """Return how the batch is divided.

        Raises:
            ConfigError: the strategy does not work.
        """
        is_alone = self.cluster.ranks == 1 and strategy.name != "single"
        check(not is_alone, "on one rank it is single")
        config = self.task.config
        ddp = replace(config.ddp, strategy=strategy.key, tensor_parallel=parts)
        config = replace(config, ddp=ddp)
        allows_compile(config, torch.device("cuda"), self.cluster.ranks)
        return divide_batch(config, self.cluster.ranks)

    def _operations(self, footprint: Footprint) -> int | None:
        """Return the operations of a step; of a model of one's own by its `flops_per_token`."""
        if footprint.activations:
            return footprint.passes * footprint.activations.operations(footprint.rows)
        per_item = flops_per_token(self.whole.model)
        if per_item is None:
            return None
        return round(footprint.passes * footprint.rows * self.items_per_row * per_item)

    def _times(self, footprint: Footprint, operations: int | None) -> dict[str, float | None]:
        """Return the least seconds of the products, of the memory and of the wire in a step.

        Each pass reads the weights twice, and each step reads and writes the state. What else
        crosses the memory depends on how operations are fused.
        """
        dtype = self.whole.dtype
        peak = peak_flops_of(self.gpu.name, dtype)
        assert peak is not None
        weights = footprint.state.numel * dtype.itemsize
        state = footprint.weights() + footprint.optimizer() + footprint.average()
        moved = 2 * footprint.passes * weights + 2 * state
        return {
            "compute_s": operations and operations / peak,
            "memory_s": moved / self.gpu.bandwidth,
            "wire_s": footprint.traffic().seconds,
        }


def make_gpu_plan(
    config: Config, machine: Machine, typed: Container[str] = (), outputs: int | None = None
) -> dict[str, Any]:
    """Return what a configuration means and needs on other GPUs, as JSON values.

    Args:
        typed: the keys that the command line sets.
        outputs: of the model, instead of those that the data needs.

    Raises:
        UserError: training would refuse the configuration too, or a user's code needs values.
    """
    gpu = GPUS[machine.device]
    network = machine.network_gbps * 1e9 / 8
    cluster = Cluster(machine.nodes, config.ddp.local_workers or 1, gpu.link, network)
    trainer = replace(config.trainer, device="cpu", compile=False)  # of this machine
    alone = replace(config, ddp=for_one_rank(config.ddp), trainer=trainer)
    runtime = Runtime(alone, DistEnv())
    warm = warm_start_of_plan(config, typed, runtime)
    batch = divide_batch(warm.config, cluster.ranks)
    config = with_batch_size(warm.config, batch.copies, None)
    allows_compile(config, torch.device("cuda"), cluster.ranks)
    task = build_task(config, runtime.group, warm.state)
    with task.discarded_if_refused():
        if outputs is not None:
            task.set_outputs(outputs)
        else:
            warm.check(task)
        loader = task.train_loader(runtime.device)
        length = known_length(config, loader.steps_per_epoch)
    loader.close()
    plan = GPUPlan(task, loader, cluster, machine)
    strategies = {strategy.name: plan.figures(strategy) for strategy in STRATEGIES}
    runtime.close()
    data = task.describe_data()
    if outputs is not None:
        data += f"; the model has {outputs:,} outputs"
    left_out = list(LEFT_OUT)
    if config.ddp.reduction == "canonical":
        left_out.append(LEFT_OUT_OF_CANONICAL)
    if all(figures["activations_bytes"] is None for figures in strategies.values()):
        left_out.append(LEFT_OUT_OF_OWN_CODE)
    model = plan.whole.model
    described: dict[str, Any] = {
        "run": str(run_directory(config)),
        "data": data,
        "device": f"{cluster.ranks} x {gpu.name} in {precision_of_gpu(config.trainer.precision)}",
        **describe_work(task, loader, length, count_parameters(model), flops_per_token(model)),
        "batch": {**asdict(batch), "items": loader.items_per_step},
        "gpu": {
            "device": machine.device,
            "ranks": cluster.ranks,
            "nodes": cluster.nodes,
            "memory_bytes": gpu.memory,
            "link_bytes_per_s": gpu.link,
            "network_bytes_per_s": network if machine.nodes > 1 else None,
            "strategies": strategies,
            "left_out": left_out,
        },
        "world_sizes": [ranks_row(warm.config, n) for n in sorted({*WORLD_SIZES, cluster.ranks})],
    }
    described["doubts"] = find_doubts(config, described, os.cpu_count() or 1)
    return described
