"""ZeRO stage 1: each parameter has an owner, the rank that keeps its optimizer state.

All ranks have all weights and gradients.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (arXiv:1910.02054).
"""

from collections.abc import Mapping
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.ddp import DDPStrategy

K = TypeVar("K")


def assign_owners(model: nn.Module, ranks: int) -> dict[str, int]:
    """Assign the trainable parameters of a model to ranks, by name."""
    named = dict(model.named_parameters())
    return share_out({n: named[n].numel() for n in sorted(named) if named[n].requires_grad}, ranks)


def share_out(sizes: Mapping[K, int], ranks: int) -> dict[K, int]:
    """Assign items of these sizes to ranks: largest first, each to the least loaded rank.

    Items of equal size are assigned in their order.
    """
    loads = [0] * ranks
    owners = {}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += size
    return owners


class OwnedState(Strategy):
    """Only the owner of a parameter keeps its state. It updates the weights and broadcasts them."""

    name = "zero1"
    optimizer_state = "owned"
    allows_several_devices = False

    # Set by `prepare`.
    _owners: dict[str, int]  # rank that owns each parameter, by its name
    _parameters: list[list[nn.Parameter]]  # parameters of each owner

    def prepare(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
        model = super().prepare(model, dtype)
        self._owners = assign_owners(model, self.n_shards)
        self._parameters = [[] for _ in range(self.n_shards)]
        parameters = dict(model.named_parameters())
        for name, owner in self._owners.items():
            self._parameters[owner].append(parameters[name])
        return model

    def update(self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters that this rank owns, and receive the others from their owners.

        An optimizer skips a parameter without a gradient and creates no state for it. The scaler
        has checked all gradients before. If an optimizer creates all state when it is built, the
        state of other owners' parameters is deleted here.
        """
        for owner, parameters in enumerate(self._parameters):
            if owner == self.group.rank:
                continue
            for parameter in parameters:
                parameter.grad = None
                optimizer.state.pop(parameter, None)
        scaler.step(optimizer)
        with self.group.waiting():
            for owner, parameters in enumerate(self._parameters):
                self._broadcast(parameters, owner)
        self.broadcast_buffers(model)

    @torch.no_grad()
    def _broadcast(self, parameters: list[nn.Parameter], owner: int) -> None:
        """Broadcast all parameters of an owner as one message."""
        if not parameters:
            return
        parts = [parameter.detach().reshape(-1).view(torch.uint8) for parameter in parameters]
        sizes = [len(part) for part in parts]
        flat = torch.cat(parts)
        dist.broadcast(flat, src=owner)
        if owner == self.group.rank:
            return
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.copy_(part.view(parameter.dtype).view(parameter.shape))

    def part_to_write(self, name: str, tensor: Tensor, writer: int) -> tuple[int, Tensor] | None:
        return super().part_to_write(name, tensor, self._owners.get(name, writer))

    def owns_state(self, name: str) -> bool:
        return self._owners.get(name, self.group.rank) == self.group.rank


@final
class Zero1Strategy(OwnedState, DDPStrategy):
    """Average gradients as DDP does, and update only the parameters that this rank owns."""
