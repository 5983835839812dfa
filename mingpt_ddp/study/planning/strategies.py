"""Compute the memory, the messages and the shortest time of a step for each strategy.

The results come from formulas alone: no rank runs. Their symbols are explained in sizes.py.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.strategies import strategy_class
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.fsdp import check_no_scalars, shards_per_replica
from mingpt_ddp.metrics.gpus import GIB
from mingpt_ddp.study.planning.batch import BatchOnRanks
from mingpt_ddp.study.planning.sizes import FP32, Sizes

# Approximate memory that CUDA and its libraries take on a GPU, or the program itself on a CPU.
OVERHEAD_BYTES = 1 << 29
HALVING_HOOKS = ("fp16", "bf16")  # values of ddp.comm_hook that send gradients in 16 bits
STRATEGIES = ("single", "ddp", "zero1", "fsdp", "hsdp", "tensor_parallel")
# Names of the figures that cannot be computed if the user wrote the model or the task.
UNKNOWN_FIGURES = (
    "peak_bytes",
    "activations_bytes",
    "temporaries_bytes",
    "largest_micro_batch_size",
)
MAX_MICRO_BATCH = 1 << 20  # a plan does not try larger micro-batches


@dataclass(frozen=True)
class Devices:
    """The devices that a plan is made for, one for each rank. A rate is None if unknown."""

    name: str
    precision: str
    nodes: int
    ranks_per_node: int
    memory: int  # bytes that each rank has
    is_gpu: bool
    peak_flops: float | None  # FLOP/s in this precision, from the vendor's data sheet
    link: float | None = None  # bytes/s that a GPU can send to the other GPUs of its node
    network: float | None = None  # bytes/s that a node can send to the other nodes

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Wire:
    """The number of bytes that each rank and each node sends in a step."""

    sent_by_rank: float
    # Bytes sent to other nodes. The ranks of a node first reduce or copy data among themselves.
    sent_by_node: float


@dataclass(frozen=True)
class Moment:
    """The memory in use at a moment of a step, in bytes, without weights and optimizer state."""

    gradients: float
    activations: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.temporaries


@dataclass(frozen=True)
class Footprint:
    """The memory and time that a strategy needs on the busiest rank, computed by formulas."""

    strategy: str
    config: Config
    sizes: Sizes
    devices: Devices
    batch: BatchOnRanks
    items: float  # tokens or samples that the busiest rank trains in each step
    data_bytes: int  # size of the data that stays on the GPU

    def figures(self) -> dict[str, Any]:
        """Compute the figures of the strategy in a plan: bytes, seconds and counts.

        Raises:
            ConfigError: The strategy cannot divide the parameters or the ranks.
        """
        if self.strategy_type.weights == "rows":
            check_no_scalars(self.strategy, dict.fromkeys(self.sizes.scalars, 0))
        rows, memory = self.batch.micro_batch_size, self.devices.memory
        peak = self.peak(rows)
        reason = None
        if peak + OVERHEAD_BYTES > memory:
            needed = f"{(peak + OVERHEAD_BYTES) / GIB:.1f} GiB including CUDA's own memory"
            reason = f"needs {needed}, but a rank has {memory / GIB:.1f} GiB"
        figures = {
            "peak_bytes": peak,
            **{f"{kind}_bytes": size for kind, size in self.memory(rows).items()},
            "micro_batch_size": rows,
            "largest_micro_batch_size": bisect_right(
                range(1, MAX_MICRO_BATCH + 1), memory - OVERHEAD_BYTES, key=self.peak
            ),
            "passes": self.batch.micro_batches_per_rank,
            "ranks_per_copy": self.ranks_per_copy,
            **self.times(),
            "reason": reason,
        }
        return figures if self.sizes.activations else {**figures, **dict.fromkeys(UNKNOWN_FIGURES)}

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that hold one copy of the model together (tensor parallelism)."""
        return self.config.ddp.tensor_parallel

    @property
    def strategy_type(self) -> type[Strategy]:
        """Class of the strategy. Its attributes say what a rank holds."""
        return strategy_class(self.config.ddp, self.devices.ranks)

    @property
    def shards(self) -> int:
        """Number of ranks among which the rows of weights, gradients and states are divided."""
        if self.strategy == "hsdp":
            return shards_per_replica([self.devices.ranks_per_node] * self.devices.nodes)
        return self.devices.ranks if self.strategy_type.weights == "rows" else 1

    @property
    def share(self) -> float:
        """Share of the weights and gradients that one rank holds, at most 1."""
        split = self.sizes.blocks / self.sizes.parameters
        return (1 - split + split / self.ranks_per_copy) / self.shards

    @property
    def optimizer_share(self) -> float:
        """Share of the optimizer's state that one rank holds, at most 1."""
        if self.strategy_type.optimizer_state == "owned":
            return max(self.sizes.largest / self.sizes.trained, 1 / self.devices.ranks)
        return self.share

    def peak(self, rows: int) -> int:
        """Return the peak memory in bytes, with micro-batches of `rows` sequences."""
        return sum(self.memory(rows).values())

    def memory(self, rows: int) -> dict[str, int]:
        """Return the bytes of each use of memory at the fullest moment of a step.

        Args:
            rows: Number of sequences in a micro-batch.
        """
        sizes = self.sizes
        weights = FP32 * sizes.parameters * self.share
        fullest = max(self.moments(rows), key=lambda moment: moment.total)
        has_average = self.config.trainer.ema is not None
        return {
            "weights": round(weights) + sizes.buffer_bytes,
            "gradients": round(fullest.gradients),
            "optimizer": round(sizes.optimizer_bytes * self.optimizer_share),
            "average": round(weights * has_average),
            "activations": round(fullest.activations),
            "temporaries": round(fullest.temporaries),
            "data": self.data_bytes,
        }

    def moments(self, rows: int) -> list[Moment]:
        """List the moments of a step at which the memory may be fullest."""
        sizes, activations = self.sizes, self.sizes.activations
        has_peers = self.devices.ranks > 1
        # The gradients stay allocated in DDP's buckets.
        has_buckets = has_peers and self.strategy_type.weights == "whole"
        gathers = self.strategy_type.weights == "rows"
        gradients = FP32 * sizes.trained * self.share
        # While passes run, a rank holds DDP's buckets, and the sums of gradients of earlier passes.
        held = gradients * (has_buckets + (self.batch.micro_batches_per_rank > 1))
        # Muon's update holds directions in fp32 and stacks of matrices in 16 bits. If ranks divide
        # the work, they also hold the messages for each other. The gradients of the matrices are
        # freed before, unless they lie in DDP's buckets.
        divides_work = has_peers and self.strategy_type.optimizer_state == "whole"
        muon = sizes.muon * (12 if divides_work else 10) * self.optimizer_share
        freed = 0 if has_buckets else FP32 * sizes.muon
        update = Moment(gradients - freed, temporaries=muon)
        if activations is None:
            return [update, Moment(max(held, gradients))]

        s, stream, logits = sizes.itemsize, activations.stream(rows), activations.logits(rows)
        embedding = activations.outputs * activations.model.n_embd
        recomputes = self.config.trainer.activation_checkpointing
        # Autocast copies weights to the type of matrix products. fsdp gathers them in that type.
        copied = 0 if gathers or s == FP32 else s
        block = (
            activations.block(rows, self.ranks_per_copy)
            + copied * sizes.block / self.ranks_per_copy
        )
        kept = activations.block_input(rows, gathers) if recomputes else block
        before = s * activations.per_block.before_blocks * stream
        blocks = before + activations.model.n_layer * kept
        backward = s * activations.per_block.backward * stream + recomputes * block
        outside = sizes.parameters - sizes.blocks
        gathered = gathers * s * (outside + sizes.block)
        # fsdp holds gradients, the weights of the next block, and an fp32 copy of the gradients
        # that are being reduced.
        reduce_buffers = gathers * (s * outside + (2 * s + FP32) * sizes.block)
        # Copies of weights that autocast keeps until the end of the forward pass.
        cached = recomputes * copied * sizes.blocks / self.ranks_per_copy
        # Two gradients of the weight that the output layer shares with the embedding.
        tied = 2 * FP32 * embedding * (activations.per_block.is_tied and not gathers)
        return [
            # The end of the forward pass.
            Moment(held, blocks, FP32 * logits + cached),
            # The backward pass of the loss, with probabilities and two gradients of the same size.
            Moment(held, blocks + FP32 * logits + copied * embedding, 2 * FP32 * logits + gathered),
            # The backward pass of the last block.
            Moment(held, blocks, backward + gathered + reduce_buffers),
            # The backward pass of the first block.
            Moment(max(held, gradients), before + kept, backward + tied),
            update,
        ]

    def times(self) -> dict[str, float | None]:
        """Return the bytes that a rank sends in a step, and the step's shortest time in seconds.

        The times assume the rates in the vendors' data sheets.
        """
        devices = self.devices
        flops = self.sizes.flops_per_item
        compute_s = wire_s = None
        if flops and devices.peak_flops:
            recompute_factor = 4 / 3 if self.config.trainer.activation_checkpointing else 1
            compute_s = (
                recompute_factor * flops * self.items / self.ranks_per_copy / devices.peak_flops
            )
        wire = self.wire()
        if devices.link and devices.network:
            wire_s = max(wire.sent_by_rank / devices.link, wire.sent_by_node / devices.network)
        return {
            "wire_bytes_per_step": round(wire.sent_by_rank),
            "compute_s": compute_s,
            "wire_s": wire_s,
            "step_s_at_peak": max(filter(None, (compute_s, wire_s)), default=None),
        }

    def wire(self) -> Wire:
        """Return the bytes that are sent in a step if collectives use ring algorithms.

        Small messages (flags, norms and losses) are left out. An all-reduce sends a message around
        the ring twice, and any other collective once. Source: Patarasuk and Yuan 2009, "Bandwidth
        optimal all-reduce algorithms for clusters of workstations" (JPDC 69(2)).
        """
        sizes, ranks, passes = self.sizes, self.devices.ranks, self.batch.micro_batches_per_rank
        gradients = FP32 * sizes.trained
        nodes = _ring(self.devices.nodes)
        if self.strategy_type.weights == "rows":
            # Ranks gather weights before each forward and backward pass, then reduce gradients.
            each = passes * (2 * sizes.itemsize * sizes.parameters + gradients)
            replicas = ranks // self.shards
            summed = 2 * passes * gradients * (replicas > 1)  # hsdp sums between its replicas
            inside = each * _ring(self.shards) + summed / self.shards * _ring(replicas)
            return Wire(inside, (summed or each) * nodes)
        if self.ranks_per_copy > 1:
            # The ranks of a copy exchange activations twice in each block, in fp32 in the backward
            # pass. Then the copies of the model reduce their gradients.
            assert sizes.activations is not None
            forward = 3 if self.config.trainer.activation_checkpointing else 2
            per_layer = (forward * sizes.itemsize + 2 * FP32) * sizes.activations.stream(
                self.batch.micro_batch_size
            )
            activations = passes * sizes.activations.model.n_layer * per_layer
            own = gradients * self.share
            sent = activations * _ring(self.ranks_per_copy) + own * _ring(
                ranks // self.ranks_per_copy
            )
            return Wire(2 * sent, 2 * own * self.ranks_per_copy * nodes)
        sent = 2 * gradients
        if self.config.ddp.comm_hook in HALVING_HOOKS:
            sent = gradients
        if self.strategy_type.optimizer_state == "owned":
            # Each rank broadcasts the weights that it has updated.
            sent += gradients
        elif sizes.muon:
            # Ranks divide the work of Muon, then gather the matrices in bf16.
            sent += 2 * sizes.muon
        return Wire(sent * _ring(ranks), sent * nodes)


def _ring(ranks: int) -> float:
    """Return the share of a message that each rank sends if it goes around a ring once."""
    return (ranks - 1) / ranks
