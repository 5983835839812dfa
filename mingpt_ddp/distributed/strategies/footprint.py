"""What each strategy needs of every rank: bytes of memory, and bytes on the wire in a step.

Counted from the sizes of the parameters and the memory of a step of a rank that holds everything;
no rank runs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from mingpt_ddp.config.schema import StrategyName
from mingpt_ddp.distributed.cluster import Cluster, Traffic, all_gather, all_reduce
from mingpt_ddp.distributed.step_memory import Bytes, ParameterSize, StepMemory, TensorSize
from mingpt_ddp.distributed.strategies.fsdp import check_no_scalars, shards_per_replica
from mingpt_ddp.distributed.strategies.zero1 import share_out
from mingpt_ddp.distributed.tensor_parallel import keep_part
from mingpt_ddp.optim.muon import MIN_NUMEL_TO_SHARD

FP32 = 4  # bytes
BF16 = 2
HALVING_HOOKS = ("fp16", "bf16")  # values of ddp.comm_hook that send gradients in 16 bits


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step."""

    passes: int  # forward and backward passes
    activations: TensorSize  # between two blocks, of a micro-batch
    recomputes: bool  # trainer.activation_checkpointing
    comm_hook: str  # ddp.comm_hook
    tensor_parallel: int  # ranks that hold a copy of the model together


class Footprint:
    """One rank alone; the base of the others."""

    name = "single"
    key: StrategyName = "single"  # ddp.strategy
    divides_muon = False  # over the ranks
    reduces_each_pass = False  # each backward pass leaves no whole gradients

    @staticmethod
    def prepare(model: nn.Module, dtype: torch.dtype, parts: int) -> None:
        """Give a model the weights with which a rank computes.

        Args:
            dtype: of matrix products.
            parts: ranks that hold a copy of the model together.
        """

    def __init__(
        self, parameters: Sequence[ParameterSize], cluster: Cluster, work: StepWork
    ) -> None:
        """
        Args:
            parameters: and buffers, of the whole model; with tensor parallelism, of a rank.

        Raises:
            ConfigError: the strategy cannot divide them.
        """
        self.parameters = parameters
        self.trained = [each for each in parameters if each.is_trained]
        self.cluster = cluster
        self.work = work

    # Bytes of the state, in each step.

    def weights(self) -> int:
        return sum(each.weight.nbytes for each in self.parameters)

    def optimizer(self) -> int:
        return sum(tensor.nbytes for each in self.trained for tensor in each.state)

    def average(self) -> int:
        return sum(each.weight.nbytes for each in self.parameters if each.has_average)

    # Bytes after each allocation of a step.

    def gradients(self, memory: StepMemory) -> Bytes:
        return memory.of("block_gradients", "other_gradients")

    def gathered(self, memory: StepMemory) -> Bytes:
        """Return what a rank holds of others, and copies that it sends."""
        return memory.during(passes=0, update=0)

    def peak(self, memory: StepMemory) -> dict[str, int]:
        """Return the bytes at the peak of a step, by kind."""
        kinds = {
            "weights": memory.during(self.weights(), self.weights()),
            "gradients": self.gradients(memory),
            "optimizer": memory.during(self.optimizer(), self.optimizer()),
            "average": memory.during(self.average(), self.average()),
            "activations": memory.of("activations"),
            "temporaries": memory.of("temporaries"),
            "gathered": self.gathered(memory),
        }
        peak = int(np.argmax(sum(kinds.values())))
        return {kind: int(live[peak]) for kind, live in kinds.items()}

    def traffic(self) -> Traffic:
        """Return what a rank sends in a step; flags, norms and losses are left out."""
        return Traffic()

    def gradient_bytes(self) -> int:
        return sum(each.weight.nbytes for each in self.trained)

    def traffic_of_muon(self) -> Traffic:
        """Return the all-gather of the matrices that the ranks orthogonalize, each some of them."""
        stacks = Counter[tuple[int, int]]()
        for each in self.trained:
            if each.matrices:
                columns = each.weight.shape[-1]
                stacks[each.numel // each.matrices // columns, columns] += each.matrices
        numel = sum(count * rows * columns for (rows, columns), count in stacks.items())
        if not self.divides_muon or numel < MIN_NUMEL_TO_SHARD:
            return Traffic()
        ranks = self.cluster.ranks
        padded = 0
        for (rows, columns), count in stacks.items():
            padded += math.ceil(count / ranks) * ranks * rows * columns
        return self.in_ring(all_gather(padded * BF16, ranks))

    def in_ring(self, sent: int) -> Traffic:
        """Return the traffic of a ring through all ranks."""
        return self.cluster.traffic(sent, self.cluster.ranks)


class ManualFootprint(Footprint):
    """All gradients are copied into one message after the passes."""

    name = "manual"
    key: StrategyName = "manual"
    divides_muon = True

    def gathered(self, memory: StepMemory) -> Bytes:
        copies = memory.during(passes=0, update=0)
        copies[memory.passes - 1] = self.gradient_bytes()
        return copies

    def traffic(self) -> Traffic:
        gradients = self.in_ring(all_reduce(self.gradient_bytes(), self.cluster.ranks))
        return gradients + self.traffic_of_muon()


class DDPFootprint(Footprint):
    """The buckets of gradients, of which the gradients are views, stay allocated."""

    name = "ddp"
    key: StrategyName = "ddp"
    divides_muon = True

    def gradients(self, memory: StepMemory) -> Bytes:
        return memory.during(self.gradient_bytes(), self.gradient_bytes())

    def traffic(self) -> Traffic:
        size = self.gradient_bytes()
        if self.work.comm_hook in HALVING_HOOKS:
            size = size * BF16 // FP32
        return self.in_ring(all_reduce(size, self.cluster.ranks)) + self.traffic_of_muon()


class Zero1Footprint(DDPFootprint):
    """The rank that owns the most; owners broadcast their parameters, each as one message."""

    name = "zero1"
    key: StrategyName = "zero1"
    divides_muon = False

    def _of_owners(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the sum of the sizes, by parameter, of each owner."""
        owners = share_out({each.name: each.numel for each in self.trained}, self.cluster.ranks)
        sums = [0] * self.cluster.ranks
        for name, owner in owners.items():
            sums[owner] += sizes[name]
        return sums

    def optimizer(self) -> int:
        states = {each.name: sum(t.nbytes for t in each.state) for each in self.trained}
        return max(self._of_owners(states))

    def gathered(self, memory: StepMemory) -> Bytes:
        messages = self._of_owners({each.name: each.weight.nbytes for each in self.trained})
        return memory.during(passes=0, update=max(messages))

    def traffic(self) -> Traffic:
        weights = sum(each.weight.nbytes for each in self.trained)
        # the last rank of a broadcast's ring sends nothing: the mean of a rank
        return super().traffic() + self.in_ring(all_gather(weights, self.cluster.ranks))


class FSDPFootprint(Footprint):
    """A part of the rows of everything, and the gathered weights of the rest and of two blocks.

    Its step is simulated with gathered weights, in the type of the products.
    """

    name = "fsdp"
    key: StrategyName = "fsdp"
    reduces_each_pass = True

    @staticmethod
    def prepare(model: nn.Module, dtype: torch.dtype, parts: int) -> None:
        """Convert the weights to `dtype`; batch normalization stays in fp32."""
        gathered: dict[nn.Parameter, nn.Parameter] = {}  # modules may share one
        for module in model.modules():
            if hasattr(module, "running_mean"):
                continue
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in gathered:
                    weights = parameter.detach().to(dtype)
                    gathered[parameter] = nn.Parameter(weights, parameter.requires_grad)
                setattr(module, name, gathered[parameter])

    def __init__(
        self, parameters: Sequence[ParameterSize], cluster: Cluster, work: StepWork
    ) -> None:
        super().__init__(parameters, cluster, work)
        dimensions = {each.name: len(each.weight.shape) for each in self.trained}
        check_no_scalars(self.name, dimensions)
        self.shards = self._shards()

    def _shards(self) -> int:
        return self.cluster.ranks

    def _shard(self, tensors: Iterable[TensorSize], itemsize: int = FP32) -> int:
        """Return the bytes of the largest part of some tensors, in a type of this size."""
        return sum(replace(each, itemsize=itemsize).shard(self.shards) for each in tensors)

    def weights(self) -> int:
        buffers = sum(each.weight.nbytes for each in self.parameters if each.is_buffer)
        return buffers + self._shard(self.weights_of_parameters())

    def optimizer(self) -> int:
        return self._shard(tensor for each in self.trained for tensor in each.state)

    def average(self) -> int:
        return self._shard(each.weight for each in self.parameters if each.has_average)

    def gradients(self, memory: StepMemory) -> Bytes:
        whole = self._shard(each.weight for each in self.trained)
        if self.work.passes > 1:
            return memory.during(whole, whole)
        # they are reduced block by block
        reduced = memory.of("block_gradients", "other_gradients") / max(1, self.gradient_bytes())
        return np.rint(reduced * whole).astype(np.int64)

    def gathered(self, memory: StepMemory) -> Bytes:
        blocks = Counter[int]()
        rest = 0
        for each in self.parameters:
            if each.block is None:
                rest += each.weight.nbytes
            else:
                blocks[each.block] += each.weight.nbytes
        block = max(blocks.values(), default=0)
        itemsize = self.parameters[0].weight.itemsize
        # of a block in its backward pass: the next one's weights, a gradient, its copy in fp32
        in_backward = memory.of("block_gradients") > 0
        live = memory.during(passes=rest + block, update=0) + memory.of("other_gradients")
        live += memory.during(passes=2 * block + block * FP32 // itemsize, update=0) * in_backward
        live[memory.passes - 1] += rest * FP32 // itemsize
        return live

    def weights_of_parameters(self) -> list[TensorSize]:
        return [each.weight for each in self.parameters if not each.is_buffer]

    def padded(self, tensors: Iterable[TensorSize], itemsize: int) -> int:
        """Return the bytes of some tensors, padded to shards of equal size."""
        return self.shards * self._shard(tensors, itemsize)

    def traffic(self) -> Traffic:
        """Gather the weights before each forward and each backward pass, then reduce gradients."""
        itemsize = self.parameters[0].weight.itemsize
        gathered = 2 * self.padded(self.weights_of_parameters(), itemsize)
        reduced = self.padded((each.weight for each in self.trained), FP32)
        size = self.work.passes * (gathered + reduced)
        sent = all_gather(size, self.shards)
        return self.cluster.traffic(sent, self.shards)


class HSDPFootprint(FSDPFootprint):
    """The shards are those of a node, or of half of a single node."""

    name = "hsdp"
    key: StrategyName = "hsdp"

    def _shards(self) -> int:
        return shards_per_replica([self.cluster.ranks_per_node] * self.cluster.nodes)

    def traffic(self) -> Traffic:
        reduced = self.padded((each.weight for each in self.trained), FP32)
        part = self.work.passes * reduced // self.shards
        replicas = self.cluster.ranks // self.shards
        sent = all_reduce(part, replicas)
        return super().traffic() + self.cluster.traffic(sent, replicas, rings_per_node=self.shards)


class TensorParallelFootprint(Footprint):
    """Part of the matrices; its step is simulated with them."""

    name = "tensor_parallel"
    key: StrategyName = "auto"

    @staticmethod
    def prepare(model: nn.Module, dtype: torch.dtype, parts: int) -> None:
        keep_part(model, parts)

    def traffic(self) -> Traffic:
        """All-reduce activations twice a block forward, and in fp32 twice backward."""
        blocks = len({each.block for each in self.parameters if each.block is not None})
        forward = 3 if self.work.recomputes else 2  # the last one is not needed again
        elements = self.work.activations.nbytes // self.work.activations.itemsize
        message = forward * self.work.activations.nbytes + 2 * elements * FP32
        sent = all_reduce(self.work.passes * blocks * message, self.work.tensor_parallel)
        traffic = self.cluster.traffic(sent, self.work.tensor_parallel)
        copies = self.cluster.ranks // self.work.tensor_parallel
        sent = all_reduce(self.gradient_bytes(), copies)
        return traffic + self.cluster.traffic(sent, copies, self.work.tensor_parallel)


FOOTPRINTS: tuple[type[Footprint], ...] = (
    Footprint,
    DDPFootprint,
    ManualFootprint,
    Zero1Footprint,
    FSDPFootprint,
    HSDPFootprint,
    TensorParallelFootprint,
)
