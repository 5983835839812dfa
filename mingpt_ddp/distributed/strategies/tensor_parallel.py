"""Tensor parallelism: consecutive ranks hold one copy of the model together; gradients are averaged
between copies.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.tensor_parallel import (
    average_gradients,
    clip_gradients,
    gather,
    local_tensor,
    scatter,
    separate_groups,
    split_model,
)

T = TypeVar("T")


class TensorParallelStrategy(Strategy):
    """Split the matrices of a GPT over the ranks of a tensor group."""

    name = "tensor parallel"

    def prepare(self, model: nn.Module) -> nn.Module:
        assert self.group.mesh is not None
        return split_model(super().prepare(model), self.group.mesh["tensor"])

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        separate_groups(optimizer)

    def join_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: gather(name.partition(":")[0], tensor) for name, tensor in tensors.items()}

    def split_tensors(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        own = dict(model.named_parameters())
        owners = {name: name.partition(":")[0] for name in tensors}
        return {
            name: scatter(o, tensors[name], own[o]) if o in own else tensors[name]
            for name, o in owners.items()
        }

    def on_whole_model(
        self, model: nn.Module, build: Callable[[], nn.Module], work: Callable[[nn.Module], T]
    ) -> T:
        """Call `work` on rank zero, which alone keeps what all ranks gather.

        Return None elsewhere.
        """
        tensors = self.join_tensors(model.state_dict())

        def call() -> T:
            copy = build()
            copy.load_state_dict(tensors)
            return work(copy.to(self.device))

        return cast(T, self.group.env.call_on_rank_zero(call))

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        start = time.perf_counter()
        average_gradients(parameters, self.group)
        self.all_reduce_s = time.perf_counter() - start

    def clip_grad_norm(self, parameters: list[nn.Parameter], limit: float | None) -> Tensor:
        return clip_gradients(parameters, limit, self.group)

    def local(self, tensor: Tensor) -> Tensor:
        return local_tensor(tensor)
