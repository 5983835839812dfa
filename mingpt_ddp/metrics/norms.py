"""Norms per layer around an optimizer step: of the weights, the gradients and the update."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.models.dtensor import is_dtensor, local_tensor
from mingpt_ddp.torch_internals import for_each

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
        layers = list(map(layer_of, self._parameters))
        self.layers = list(dict.fromkeys(layers))
        self._indices = torch.tensor([self.layers.index(layer) for layer in layers])

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
        gradients = []
        for parameter in parameters:
            gradient = parameter.grad
            missing = before[0].new_zeros(())
            gradients.append(missing if gradient is None else local_tensor(gradient))
        measured = [*_norms(before), *_norms(gradients)]
        yield
        after = [local_tensor(p.detach()) for p in parameters]
        measured += _norms(for_each("sub", after, before))
        norms = self.group.all_reduce(self._sum_squares(measured)).sqrt().tolist()
        metrics = {}
        for kind, row in zip(KINDS, norms, strict=True):
            for layer, norm in zip(self.layers, row, strict=True):
                metrics[f"norms/{kind}/{layer}"] = norm
        log(step, metrics)

    def _sum_squares(self, norms: list[Tensor]) -> Tensor:
        """Return this rank's share of the sums of squares by kind and layer.

        All shares add up to the whole model. This alone waits for the device, for one copy.

        Args:
            norms: of the parameters' tensors, one kind after the other.
        """
        device = norms[0].device
        together = torch.stack([norm.to(device) for norm in norms])
        with self.group.waiting():
            on_host = together.cpu().double()
        shares = [self._share(parameter) for parameter in self._parameters.values()]
        squares = on_host.view(len(KINDS), -1) ** 2 * torch.tensor(shares, dtype=torch.float64)
        sums = squares.new_zeros(len(KINDS), len(self.layers))
        return sums.index_add(1, self._indices, squares)

    def _share(self, parameter: Tensor) -> float:
        """Return the weight of one rank's part in the sum; several ranks may hold the same part."""
        parts = 1
        if is_dtensor(parameter):
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_shard():
                    parts *= parameter.device_mesh.size(dimension)
        return parts / self.group.world_size


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor in fp32, a scalar on its device; 0 of an empty one."""
    values = [tensor if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]
    norms: Sequence[Tensor] = for_each("norm", [tensor.float() for tensor in values])
    return norms
