"""Norms per layer around an optimizer step: of the weights, the gradients and the update."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.tensor_parallel import is_dtensor, local_tensor

KINDS = ("weights", "gradients", "update")


def layer_of(parameter: str) -> str:
    """Return a parameter's layer: `blocks.0` of `blocks.0.up.weight`, `head` of `head.weight`."""
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", parameter)
    return numbered[0] if numbered else parameter.partition(".")[0]


class LayerNorms:
    """Measure every n-th step.

    Each rank adds what it holds, so the norms are those of the whole model.
    """

    def __init__(self, group: ProcessGroup, model: nn.Module, every: int | None) -> None:
        self.group = group
        self.every = every
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.layers = list(dict.fromkeys(map(layer_of, self._parameters)))

    @contextmanager
    @torch.no_grad()
    def measure(self, step: int, log: Callable[[int, dict[str, float]], None]) -> Iterator[None]:
        """Pass the norms to `log` if they are due, after the optimizer step in this context.

        A collective.

        The gradients are those after clipping. Until the end the weights before the update take
        memory, too.
        """
        if self.every is None or step % self.every:
            yield
            return
        parameters = self._parameters.values()
        before = [local_tensor(p.detach()).clone() for p in parameters]
        gradients = [None if p.grad is None else local_tensor(p.grad) for p in parameters]
        sums = [self._squares(before), self._squares(gradients)]
        yield
        update = [local_tensor(p.detach()) - old for p, old in zip(parameters, before, strict=True)]
        sums.append(self._squares(update))
        norms = self.group.all_reduce(torch.stack(sums)).sqrt().tolist()
        metrics = {}
        for kind, row in zip(KINDS, norms, strict=True):
            for layer, norm in zip(self.layers, row, strict=True):
                metrics[f"norms/{kind}/{layer}"] = norm
        log(step, metrics)

    def _squares(self, tensors: list[Tensor] | list[Tensor | None]) -> Tensor:
        """Return this rank's share of the sums of squares by layer.

        All shares add up to the whole model.
        """
        sums = torch.zeros(len(self.layers), dtype=torch.float64)
        for (name, parameter), tensor in zip(self._parameters.items(), tensors, strict=True):
            if tensor is not None and tensor.numel():
                square = float(torch.linalg.vector_norm(tensor.float())) ** 2
                sums[self.layers.index(layer_of(name))] += square * self._share(parameter)
        return sums

    def _share(self, parameter: Tensor) -> float:
        """Return the weight of one rank's part in the sum; several ranks may hold the same part."""
        parts = 1
        if is_dtensor(parameter):
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_shard():
                    parts *= parameter.device_mesh.size(dimension)
        return parts / self.group.world_size
