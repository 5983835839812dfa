"""Tensor parallelism: consecutive ranks hold one copy of the model together.

Gradients are averaged between copies.
"""

import time
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.tensor_split import (
    average_gradients,
    gather,
    scatter,
    separate_groups,
    split_model,
    total_norm,
)


@final
class TensorParallelStrategy(Strategy):
    """Split the matrices of a GPT over the ranks of a tensor group."""

    name = "tensor parallel"
    weights = "columns"
    optimizer_state = "columns"

    def prepare(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
        assert self.group.mesh is not None
        return split_model(super().prepare(model, dtype), self.group.mesh["tensor"])

    def configure(self, optimizer: Optimizer) -> None:
        super().configure(optimizer)
        separate_groups(optimizer)

    def join_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        whole = {}
        with self.group.waiting():
            for name, tensor in tensors.items():
                whole[name] = gather(name.partition(":")[0], tensor)
        return whole

    def split_tensors(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        split = {}
        for name, tensor in tensors.items():
            owner = name.partition(":")[0]
            is_buffer = owner not in parameters
            split[name] = tensor if is_buffer else scatter(owner, tensor, parameters[owner])
        return split

    def gather_weights(self, model: nn.Module) -> Mapping[str, Tensor]:
        return self.join_tensors(model.state_dict())

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        start = time.perf_counter()
        average_gradients(parameters, self.group)
        self.all_reduce_s = time.perf_counter() - start

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return total_norm(gradients, self.group)
