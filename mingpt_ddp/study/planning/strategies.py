"""Compute the memory, the messages and the least time of a step, for each strategy.

These are formulas, with the symbols of sizes.py. No rank runs.
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

# Approximate bytes that CUDA and its libraries take on a GPU, or the program itself on a CPU.
CONTEXT = 1 << 29
HALVING_HOOKS = ("fp16", "bf16")  # values of ddp.comm_hook that send gradients in 16 bits
STRATEGIES = ("single", "ddp", "zero1", "fsdp", "hsdp", "tensor_parallel")
# Figures that are unknown if a user wrote the model or the task.
UNKNOWN = ("peak_bytes", "activations_bytes", "temporaries_bytes", "largest_micro_batch_size")
MOST_ROWS = 1 << 20  # largest micro-batch that is tried


@dataclass(frozen=True)
class Devices:
    """The devices to plan for, one for each rank. A rate is None if it is not known."""

    name: str
    precision: str
    nodes: int
    ranks_per_node: int
    memory: int  # bytes for each rank
    is_gpu: bool
    peak_flops: float | None  # the vendor's rate in this precision
    link: float | None = None  # bytes/s that a GPU sends to others of its node
    network: float | None = None  # bytes/s that a node sends to others

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Wire:
    """Bytes that are sent in a step."""

    sent: float  # by a rank
    leaves_node: float  # by a node, whose ranks first reduce, or copy, among themselves


@dataclass(frozen=True)
class Moment:
    """Memory at a moment of a step in bytes, besides the weights and the optimizer's state."""

    gradients: float
    activations: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.temporaries


@dataclass(frozen=True)
class Footprint:
    """The needs of a strategy on the rank that needs most."""

    strategy: str
    config: Config
    sizes: Sizes
    devices: Devices
    batch: BatchOnRanks
    items: float  # tokens or samples of the busiest rank in each step
    data: int  # bytes of a text that stays on the GPU

    def figures(self) -> dict[str, Any]:
        """Return the figures of the strategy: bytes, seconds and counts.

        Raises:
            ConfigError: The strategy cannot divide the parameters, or the ranks.
        """
        if self.rank_holds.weights == "rows":
            check_no_scalars(self.strategy, dict.fromkeys(self.sizes.scalars, 0))
        rows, memory = self.batch.micro_batch_size, self.devices.memory
        peak = self.peak(rows)
        reason = None
        if peak + CONTEXT > memory:
            needed = f"{(peak + CONTEXT) / GIB:.1f} GiB with CUDA's own"
            reason = f"needs {needed}, a rank has {memory / GIB:.1f}"
        figures = {
            "peak_bytes": peak,
            **{f"{kind}_bytes": size for kind, size in self.memory(rows).items()},
            "micro_batch_size": rows,
            "largest_micro_batch_size": bisect_right(
                range(1, MOST_ROWS + 1), memory - CONTEXT, key=self.peak
            ),
            "passes": self.batch.micro_batches_per_rank,
            "ranks_per_copy": self.parts,
            **self.times(),
            "reason": reason,
        }
        return figures if self.sizes.activations else {**figures, **dict.fromkeys(UNKNOWN)}

    @property
    def parts(self) -> int:
        """Number of ranks that hold one copy of the model together (tensor parallelism)."""
        return self.config.ddp.tensor_parallel

    @property
    def rank_holds(self) -> type[Strategy]:
        """The class of the strategy: it says what a rank holds."""
        return strategy_class(self.config.ddp, self.devices.ranks)

    @property
    def shards(self) -> int:
        """Number of ranks that divide the rows of weights, gradients and optimizer state."""
        if self.strategy == "hsdp":
            return shards_per_replica([self.devices.ranks_per_node] * self.devices.nodes)
        return self.devices.ranks if self.rank_holds.weights == "rows" else 1

    @property
    def share(self) -> float:
        """The share of the weights and gradients that a rank holds."""
        split = self.sizes.blocks / self.sizes.parameters
        return (1 - split + split / self.parts) / self.shards

    @property
    def optimizer_share(self) -> float:
        """The share of the optimizer's state that a rank holds."""
        if self.rank_holds.optimizer_state == "owned":
            return max(self.sizes.largest / self.sizes.trained, 1 / self.devices.ranks)
        return self.share

    def peak(self, rows: int) -> int:
        return sum(self.memory(rows).values())

    def memory(self, rows: int) -> dict[str, int]:
        """Return bytes by kind, at the fullest moment of a step with micro-batches of `rows`."""
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
            "data": self.data,
        }

    def moments(self, rows: int) -> list[Moment]:
        """Return the moments of a step that may need most memory."""
        sizes, known = self.sizes, self.sizes.activations
        has_peers = self.devices.ranks > 1
        has_buckets = has_peers and self.rank_holds.weights == "whole"  # gradients stay allocated
        gathers = self.rank_holds.weights == "rows"
        gradients = FP32 * sizes.trained * self.share
        # While passes run: the buckets, and the gradients that earlier passes have summed.
        held = gradients * (has_buckets + (self.batch.micro_batches_per_rank > 1))
        # Muon holds directions in fp32 and stacks of matrices in 16 bits. If ranks divide its work,
        # they also hold messages.
        divides_work = has_peers and self.rank_holds.optimizer_state == "whole"
        muon = sizes.muon * (12 if divides_work else 10) * self.optimizer_share
        freed = 0 if has_buckets else FP32 * sizes.muon
        update = Moment(gradients - freed, temporaries=muon)
        if known is None:
            return [update, Moment(max(held, gradients))]

        s, stream, logits = sizes.itemsize, known.stream(rows), known.logits(rows)
        embedding = known.outputs * known.model.n_embd
        recomputes = self.config.trainer.activation_checkpointing
        # Autocast copies weights. With fsdp they are gathered in the type of products instead.
        copied = 0 if gathers or s == FP32 else s
        block = known.block(rows, self.parts) + copied * sizes.block / self.parts
        kept = known.block_input(rows, gathers) if recomputes else block
        before = s * known.row.before * stream
        blocks = before + known.model.n_layer * kept
        backward = s * known.row.backward * stream + recomputes * block
        outside = sizes.parameters - sizes.blocks
        gathered = gathers * s * (outside + sizes.block)
        # Gradients, the next block's weights, and an fp32 copy of the gradients to reduce.
        reduced = gathers * (s * outside + (2 * s + FP32) * sizes.block)
        cached = recomputes * copied * sizes.blocks / self.parts
        tied = 2 * FP32 * embedding * (known.row.is_tied and not gathers)
        return [
            Moment(held, blocks, FP32 * logits + cached),  # end of the forward pass
            Moment(  # backward pass of the loss: probabilities, two gradients of that size
                held, blocks + FP32 * logits + copied * embedding, 2 * FP32 * logits + gathered
            ),
            Moment(held, blocks, backward + gathered + reduced),  # of the last block
            Moment(max(held, gradients), before + kept, backward + tied),  # of the first block
            update,
        ]

    def times(self) -> dict[str, float | None]:
        """Return the bytes that a rank sends in a step, and the least seconds at vendors' rates."""
        devices = self.devices
        flops = self.sizes.flops_per_item
        compute_s = wire_s = None
        if flops and devices.peak_flops:
            again = 4 / 3 if self.config.trainer.activation_checkpointing else 1
            compute_s = again * flops * self.items / self.parts / devices.peak_flops
        wire = self.wire()
        if devices.link and devices.network:
            wire_s = max(wire.sent / devices.link, wire.leaves_node / devices.network)
        return {
            "wire_bytes_per_step": round(wire.sent),
            "compute_s": compute_s,
            "wire_s": wire_s,
            "step_s_at_peak": max(filter(None, (compute_s, wire_s)), default=None),
        }

    def wire(self) -> Wire:
        """Return the bytes of a step by ring algorithms; flags, norms and losses are left out.

        Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations" (JPDC 69(2)). An all-reduce goes around the ring twice, all others once.
        """
        sizes, ranks, passes = self.sizes, self.devices.ranks, self.batch.micro_batches_per_rank
        gradients = FP32 * sizes.trained
        nodes = _ring(self.devices.nodes)
        if self.rank_holds.weights == "rows":
            # gather weights before each forward and backward pass, then reduce gradients
            each = passes * (2 * sizes.itemsize * sizes.parameters + gradients)
            replicas = ranks // self.shards
            summed = 2 * passes * gradients * (replicas > 1)  # of hsdp, between replicas
            inside = each * _ring(self.shards) + summed / self.shards * _ring(replicas)
            return Wire(inside, (summed or each) * nodes)
        if self.parts > 1:  # activations twice a block, in fp32 backward; then gradients of copies
            assert sizes.activations is not None
            forward = 3 if self.config.trainer.activation_checkpointing else 2
            per_block = (forward * sizes.itemsize + 2 * FP32) * sizes.activations.stream(
                self.batch.micro_batch_size
            )
            activations = passes * sizes.activations.model.n_layer * per_block
            own = gradients * self.share
            sent = activations * _ring(self.parts) + own * _ring(ranks // self.parts)
            return Wire(2 * sent, 2 * own * self.parts * nodes)
        sent = 2 * gradients
        if self.config.ddp.comm_hook in HALVING_HOOKS:
            sent = gradients
        if self.rank_holds.optimizer_state == "owned":  # each owner broadcasts its weights
            sent += gradients
        elif sizes.muon:  # ranks gather the matrices in bf16
            sent += 2 * sizes.muon
        return Wire(sent * _ring(ranks), sent * nodes)


def _ring(ranks: int) -> float:
    """Return the share of a message that each of `ranks` sends, once around a ring."""
    return (ranks - 1) / ranks
