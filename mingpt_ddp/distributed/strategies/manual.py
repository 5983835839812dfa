"""Data parallelism by hand: DistributedDataParallel without its overlap with the backward pass."""

import time

import torch
import torch.distributed as dist
from torch import nn

from mingpt_ddp.distributed.strategies.base import Strategy


class ManualStrategy(Strategy):
    """Average the gradients with one all-reduce after the last backward pass of a step."""

    name = "manual"

    def wrap(self, model: nn.Module, graphs: bool = False) -> nn.Module:
        self._broadcast_weights(model)
        return super().wrap(model, graphs)

    @torch.no_grad()
    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients: every rank has those of its own micro-batches.

        The mean over ranks of the gradients of equal shares is the gradient of the whole batch. All
        ranks then take the same step from the same weights, so the weights need no further
        communication.
        """
        start = time.perf_counter()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sizes = [gradient.numel() for gradient in gradients]
        # Send one message: each has a latency.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        flat /= self.group.world_size
        for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))
        self.all_reduce_s = time.perf_counter() - start
