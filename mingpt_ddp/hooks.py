"""How the ranks take the mean of their gradients, where it is not DDP's own all-reduce.

A hook is given one bucket of gradients after the other, in the same order on every rank, and answers with their means.
Memory that lasts from step to step has to go into the snapshots: `memory` and `recall`.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.groups import DDPConfig
from mingpt_ddp.neighbours import Neighbours
from mingpt_ddp.seeds import key_to_seed

ALIGNED = 64  # bytes
SETTLING = 2  # throw-away backward passes before the first step, see Runtime.settle


class Hook:
    """What all hooks have; this one remembers nothing."""

    seconds = 0.0  # spent on the buckets of the latest backward pass, in which this thread computed no gradients

    def answer(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """`mean`, and the time that it takes."""
        began = time.perf_counter()
        future = self.mean(bucket)
        self.seconds = time.perf_counter() - began + (self.seconds if bucket.index() else 0.0)
        return future

    def mean(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The mean over the ranks of one bucket."""
        raise NotImplementedError

    def memory(self) -> dict[str, Tensor]:
        """What the next step needs of the steps before, the same on every rank, to keep. A collective."""
        return {}

    def recall(self, memory: dict[str, Tensor]) -> None:
        """
        Args:
            memory: of any number of ranks; empty for the first step.

        Raises:
            SnapshotError: it is none of this model's.
        """

    def forget(self) -> None:
        """The last step was sick, and so is what is remembered of it."""


def make_hook(ddp: DDPConfig, neighbours: Neighbours | None, model: nn.Module, seed: int) -> Hook | None:
    """The hook that is wanted; None: DDP's own all-reduce. A collective.

    Args:
        neighbours: where gradients may be exchanged in shared memory.
        seed: the run's.
    """
    if ddp.comm_hook in ("fp16", "bf16"):
        return Rounded(ddp.comm_hook)
    if ddp.comm_hook == "powersgd":
        return PowerSGD(ddp.powersgd_rank, model, seed)
    if neighbours is not None:
        return SharedSum(neighbours, [p for p in model.parameters() if p.requires_grad])
    return None


class SharedSum(Hook):
    """The mean, taken in memory that all ranks share.

    The order of the additions is that of the ranks, whatever the buckets are. Nothing is gained by beginning before the
    last bucket is there: the cores that would copy the first ones are those that compute the others.
    """

    def __init__(self, neighbours: Neighbours, parameters: list[nn.Parameter]) -> None:
        """
        Args:
            parameters: those that have gradients.
        """
        self.neighbours = neighbours
        size = sum(p.numel() * p.element_size() + ALIGNED for p in parameters)
        self._memory = neighbours.shared_memory(size)
        self._buckets: list[tuple[Tensor, list[Tensor], Future[Tensor]]] = []
        self._end = 0  # of what the buckets so far take in memory

    def mean(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """It is there when the last bucket is."""
        if not self._buckets:
            self.neighbours.hear(0)  # all have read what was there before
            self._end = 0
        buffer = bucket.buffer()
        begin = self._end
        self._end += -(-buffer.nbytes // ALIGNED) * ALIGNED
        places = [memory[begin : begin + buffer.nbytes].view(buffer.dtype) for memory in self._memory]
        torch.mul(buffer, 1 / self.neighbours.world_size, out=places[self.neighbours.rank])
        future: Future[Tensor] = Future()
        self._buckets.append((buffer, places, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        self.neighbours.tell(b"w")  # written
        self.neighbours.hear(1)
        for buffer, places, _ in self._buckets:
            torch.add(places[0], places[1], out=buffer)
            for place in places[2:]:
                buffer += place
        self.neighbours.leave_unread(b"r")  # read
        for buffer, _, future in self._buckets:
            future.set_result(buffer)
        self._buckets.clear()


class Rounded(Hook):
    """Half of the bytes: gradients are rounded to 16 bits, and so are their sums."""

    def __init__(self, kind: str) -> None:
        """
        Args:
            kind: fp16 has more digits, bf16 the range of fp32.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        # DDP takes torch's bf16 hook for NCCL alone, but gloo can add such numbers too.
        self._hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook

    def mean(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self._hook(None, bucket)  # type: ignore[arg-type]


class PowerSGD(Hook):
    """Gradients of matrices as products of two thin ones: Vogels et al. 2019 (arXiv:1905.13727), as torch has it.

    What the product lacks is added to the rank's next gradient (error feedback), and the last factors are where the
    next ones begin (warm start). All gradients have to be in one bucket: torch's callbacks wait for collectives, which
    with several buckets may use up gloo's threads and come in another order on another rank.
    """

    def __init__(self, rank: int, model: nn.Module, seed: int) -> None:
        """
        Args:
            rank: columns of the thin matrices.
            seed: the run's, from which the first factors follow.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        self._device = next(model.parameters()).device
        self.rank, self._seed = rank, key_to_seed("powersgd", seed) % 2**32
        self._names = {p.data_ptr(): f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()}
        self._layout = ""  # identifies the order of the gradients in the bucket
        self._shapes: list[torch.Size] = []
        self._hook = powersgd.powerSGD_hook
        self._state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=SETTLING, random_seed=self._seed)

    def mean(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() or not bucket.is_last():
            raise CodeError("ddp.comm_hook=powersgd needs parameters that are all of the same type")
        if self._state.iter < SETTLING:  # DDP changes the order once
            names = [self._names[p.data_ptr()] for p in bucket.parameters()]
            self._layout = hashlib.sha256(";".join(names).encode()).hexdigest()[:16]
            self._shapes = [p.shape for p in bucket.parameters()]
        return self._hook(self._state, bucket)

    def memory(self) -> dict[str, Tensor]:
        if not self._state.error_dict:
            return {}
        own = self._state.error_dict[0]
        errors = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(errors, own)
        factors = torch.cat([self._state.p_memory_dict[0], self._state.q_memory_dict[0]])
        return {f"{self._layout}/errors": torch.stack(errors), f"{self._layout}/factors-{self.rank}": factors}

    def recall(self, memory: dict[str, Tensor]) -> None:
        """Another number of ranks gets the mean error for each, which adds up to the same; another rank new factors."""
        self.forget()
        errors = memory.get(f"{self._layout}/errors")
        if errors is None:
            return
        p, q = self._sizes()
        factors = memory.get(f"{self._layout}/factors-{self.rank}")
        numel = sum(shape.numel() for shape in self._shapes)
        if errors.shape[1:] != (numel,) or not len(errors) or not (factors is None or factors.shape == (p + q,)):
            raise SnapshotError("the snapshot's memory of ddp.comm_hook=powersgd does not fit the model")
        device = self._device
        same = len(errors) == dist.get_world_size()
        self._state.error_dict[0] = (errors[dist.get_rank()] if same else errors.mean(0)).to(device, copy=True)
        if factors is not None:
            self._state.p_memory_dict[0], self._state.q_memory_dict[0] = (
                part.to(device, copy=True) for part in factors.split([p, q])
            )

    def _sizes(self) -> tuple[int, int]:
        """Numbers in both factors of all matrices that are worth it."""
        p = q = 0
        for shape in self._shapes:
            rows, columns = shape[0], shape[1:].numel()
            rank = min(rows, columns, self.rank)
            if (rows + columns) * rank * self._state.min_compression_rate < rows * columns:
                p, q = p + rows * rank, q + columns * rank
        return p, q

    def forget(self) -> None:
        for kept in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            kept.clear()
        self._state.rng = np.random.RandomState(self._seed)
