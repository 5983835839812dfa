"""What each strategy needs of every rank, by formulas: bytes of memory, and bytes on the wire.

N is the number of parameters, n that of ranks, s the bytes of an element in products. No rank runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from mingpt_ddp.config.keys.schema import StrategyName
from mingpt_ddp.distributed.strategies.base import DIVIDED
from mingpt_ddp.distributed.strategies.fsdp import check_no_scalars, shards_per_replica
from mingpt_ddp.distributed.strategies.zero1 import share_out
from mingpt_ddp.optim.muon import MIN_NUMEL_TO_SHARD
from mingpt_ddp.planning.cluster import Cluster, Traffic, all_gather, all_reduce
from mingpt_ddp.planning.measured_plan import BatchOnRanks
from mingpt_ddp.planning.sizing import FP32, MOMENTS, activations_of
from mingpt_ddp.planning.state_shapes import State, part_bytes

BF16 = 2
HALVING_HOOKS = ("fp16", "bf16")  # values of ddp.comm_hook that send gradients in 16 bits
MOST_ROWS = 1 << 20  # of a micro-batch


@dataclass(frozen=True)
class Strategy:
    """What the formulas of a strategy differ by."""

    name: str
    key: StrategyName  # ddp.strategy
    has_buckets: bool = False  # of gradients, which stay allocated
    shares_muon: bool = False  # the ranks divide its matrices

    @property
    def divides_rows(self) -> bool:
        """Return whether the ranks divide the rows of everything, and gather them."""
        return "weights" in DIVIDED.get(self.key, ())

    @property
    def has_owners(self) -> bool:
        """Return whether each parameter is updated by one rank."""
        return self.key in DIVIDED and not self.divides_rows


STRATEGIES = (
    Strategy("single", "single"),
    Strategy("ddp", "ddp", has_buckets=True, shares_muon=True),
    Strategy("zero1", "zero1", has_buckets=True),
    Strategy("fsdp", "fsdp"),
    Strategy("hsdp", "hsdp"),
    Strategy("tensor_parallel", "auto"),
)


class Footprint:
    """The bytes of one rank, of those that hold most."""

    def __init__(
        self, strategy: Strategy, state: State, cluster: Cluster, batch: BatchOnRanks
    ) -> None:
        """
        Args:
            state: of the parts of a rank.

        Raises:
            ConfigError: the strategy cannot divide the parameters, or the ranks.
        """
        self.strategy = strategy
        self.state = state
        self.cluster = cluster
        self.rows = batch.micro_batch_size
        self.passes = batch.micro_batches_per_rank
        # None: unknown, as of a user's model.
        self.activations = activations_of(state, strategy.divides_rows)
        self.shards = 1  # that the rows are divided into
        if strategy.divides_rows:
            check_no_scalars(strategy.name, {n: p.dim() for n, p in state.trained.items()})
            self.shards = cluster.ranks
        if strategy.name == "hsdp":
            self.shards = shards_per_replica([cluster.ranks_per_node] * cluster.nodes)
        self.updated = self._updated_names()
        self.stacks = state.stacks(self.updated)
        self.muon_numel = sum(count * numel for count, numel in self.stacks)

    def _updated_names(self) -> list[str]:
        """Return the names of the parameters that this rank updates."""
        if not self.strategy.has_owners:
            return list(self.state.trained)
        sizes = {name: p.numel() for name, p in sorted(self.state.trained.items())}
        names: list[list[str]] = [[] for _ in range(self.cluster.ranks)]
        for name, owner in share_out(sizes, self.cluster.ranks).items():
            names[owner].append(name)
        return max(names, key=self._optimizer_bytes)

    def _optimizer_bytes(self, names: Iterable[str]) -> int:
        return sum(self._part_bytes(self.state.optimizer_tensors(name)) for name in names)

    def _part_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(part_bytes(tensor, self.shards) for tensor in tensors)

    def weights(self) -> int:
        """Return 4 N, divided by rows with fsdp and hsdp; buffers are whole."""
        buffers = sum(buffer.nbytes for buffer in self.state.model.buffers())
        return buffers + self._part_bytes(self.state.parameters.values())

    def optimizer(self) -> int:
        """Return what a step leaves: of AdamW 8 N, divided by rows or, with zero1, by owners."""
        return self._optimizer_bytes(self.updated)

    def average(self) -> int:
        """Return 4 N with trainer.ema, divided as the weights."""
        if self.state.task.config.trainer.ema is None:
            return 0
        return self._part_bytes(self.state.parameters.values())

    def gradients(self, moment: str) -> int:
        """Return 4 N, divided as the weights, after the first pass and from the end of the last.

        In the backward pass of the first block, those of the others. Buckets are there always, and
        4 N more of passes before the last one, which are not in them yet. Muon frees those of its
        matrices, 4 M, unless they are in buckets.
        """
        whole = self._part_bytes(self.state.trained.values())
        has_more = self.passes > 1
        in_passes = moment in ("forward", "loss", "last", "first")
        if self.strategy.has_buckets:
            return whole * (1 + (in_passes and has_more))
        if moment == "first" and not has_more:
            return whole - whole * max(self.state.blocks, default=0) // self.state.numel
        freed = FP32 * self.muon_numel * (moment == "update")
        return (whole - freed) * (has_more or not in_passes)

    def gathered(self, moment: str) -> int:
        """Return the bytes of weights and gradients that belong to other ranks, or are sent.

        For zero1 these are the message with an owner's weights. For fsdp, let R be the elements
        outside of the blocks, b those of a block, and s the bytes of an element. A forward pass
        holds s (R + b). The backward pass of a block also holds the next block's weights, its
        gradients, and their copy in fp32, (2 s + 4) b, and the gradients outside of the blocks,
        s R. At its end the backward pass holds at least 4 R.
        """
        if moment == "message" and self.strategy.has_owners:
            return sum(self.state.trained[name].nbytes for name in self.updated)
        if moment in ("message", "update") or not self.strategy.divides_rows:
            return 0
        block = max(self.state.blocks, default=0)
        rest = self.state.numel - sum(self.state.blocks)
        s = self.state.dtype.itemsize
        reduced = (2 * s + FP32) * block
        if moment == "end":
            return 2 * s * rest + max(FP32 * rest, reduced)
        return s * (rest + block) + (s * rest + reduced) * (moment in ("last", "first"))

    def _divides_muon(self) -> bool:
        """Return whether the ranks divide Muon's matrices."""
        return self.strategy.shares_muon and self.muon_numel >= MIN_NUMEL_TO_SHARD

    def _padded_muon(self, least: int = 1) -> int:
        """Return the elements of Muon's matrices, padded to as many of a shape for each rank.

        Args:
            least: of a shape for each rank; those with fewer do not count.
        """
        padded = 0
        for count, numel in self.stacks:
            share = ceil(count / self.cluster.ranks)
            if share >= least:
                padded += share * self.cluster.ranks * numel
        return padded

    def muon(self) -> int:
        """Return what Muon allocates, of M elements in all matrices and S in those of a shape.

        Directions in fp32, 4 M; stacks in bf16, 2 M, and the last one's matrices, 2 S. Divided:
        what is received, 2 M, and its copy where a rank has several matrices, 2 M; its part and its
        message, 2 x 2 M / n. Else the results, 2 M, and in an iteration two more of the stack,
        2 x 2 S, and two of its products with itself, about 2 x S / 2.
        """
        largest = max((count * numel for count, numel in self.stacks), default=0)
        both = (FP32 + BF16) * self.muon_numel + BF16 * largest
        if self._divides_muon():
            every = self._padded_muon()
            copied = self._padded_muon(least=2)
            return both + BF16 * (every + copied) + 2 * BF16 * every // self.cluster.ranks
        return both + BF16 * self.muon_numel + 5 * largest

    def at(self, moment: str, rows: int) -> dict[str, int]:
        """Return the bytes of each kind at a moment with micro-batches of `rows`."""
        kept, temporaries = 0, 0
        if self.activations:
            kept, temporaries = self.activations.at(moment, rows)
        if moment == "end" and self.strategy.has_buckets:
            # the gradient of the first parameter, before it is copied into its bucket
            temporaries += next(iter(self.state.trained.values())).nbytes
        if moment == "update":
            temporaries = self.muon()
        return {
            "weights": self.weights(),
            "gradients": self.gradients(moment),
            "optimizer": self.optimizer(),
            "average": self.average(),
            "activations": kept,
            "temporaries": temporaries,
            "gathered": self.gathered(moment),
        }

    def peak(self) -> dict[str, int]:
        """Return the bytes of each kind at the fullest moment."""
        return max((self.at(each, self.rows) for each in MOMENTS), key=lambda at: sum(at.values()))

    def largest(self, memory: int) -> int:
        """Return the most rows that fit: (memory - a) // b, where they take a + b rows bytes."""
        most = MOST_ROWS
        for moment in MOMENTS:
            fixed, one = (sum(self.at(moment, rows).values()) for rows in (0, 1))
            if fixed > memory:
                return 0
            if one > fixed:
                most = min(most, (memory - fixed) // (one - fixed))
        return most

    def traffic(self) -> Traffic:
        """Return what a rank sends in a step; flags, norms and losses are left out."""
        if self.strategy.divides_rows:
            return self._traffic_of_rows()
        if self.state.parts > 1:
            return self._traffic_of_parts()
        if self.strategy.name == "single":
            return Traffic()
        return self._traffic_of_gradients()

    def _traffic_of_gradients(self) -> Traffic:
        """All-reduce 2 (n - 1) / n x 4 N, or 2 N in 16 bits.

        zero1: (n - 1) / n x 4 N more, of broadcasts whose last rank sends nothing. Muon: an
        all-gather in bf16, of stacks that are padded to the same number of matrices for each rank.
        """
        ranks = self.cluster.ranks
        numel = sum(p.numel() for p in self.state.trained.values())
        is_halved = self.state.task.config.ddp.comm_hook in HALVING_HOOKS
        sent = all_reduce(numel * (BF16 if is_halved else FP32), ranks)
        if self.strategy.has_owners:
            sent += all_gather(numel * FP32, ranks)
        if self._divides_muon():
            sent += all_gather(BF16 * self._padded_muon(), ranks)
        return self.cluster.traffic(sent, ranks)

    def _traffic_of_rows(self) -> Traffic:
        """All-gather s N before each forward and backward pass, then reduce 4 N: (n - 1) / n of it.

        hsdp: then all-reduce the 4 N / n of a rank over m replicas, 2 (m - 1) / m. Rows are padded.
        """
        size = self.shards * self._part_bytes(self.state.parameters.values()) // FP32
        gathered = 2 * size * self.state.dtype.itemsize
        reduced = self.shards * self._part_bytes(self.state.trained.values())
        replicas = self.cluster.ranks // self.shards
        inside = all_gather(self.passes * (gathered + reduced), self.shards)
        between = all_reduce(self.passes * reduced // self.shards, replicas)
        return self.cluster.traffic(inside, self.shards) + self.cluster.traffic(
            between, replicas, rings_per_node=self.shards
        )

    def _traffic_of_parts(self) -> Traffic:
        """All-reduce activations, E elements twice a block forward and in fp32 backward.

        Once more where they are computed again, without the last one. Then 4 N over the copies.
        """
        parts = self.state.parts
        assert self.activations is not None
        elements = self.activations.stream(self.rows)
        forward = 3 if self.state.task.config.trainer.activation_checkpointing else 2
        message = (forward * self.state.dtype.itemsize + 2 * FP32) * elements
        layers = self.activations.model.n_layer
        summed = all_reduce(self.passes * layers * message, parts)
        copies = self.cluster.ranks // parts
        averaged = all_reduce(self._part_bytes(self.state.trained.values()), copies)
        return self.cluster.traffic(summed, parts) + self.cluster.traffic(averaged, copies, parts)
