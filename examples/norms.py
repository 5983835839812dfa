r"""Log the norms of each layer's weights, gradients and updates.

    python main.py experiment=demo run.name=norms ddp.nproc_per_node=2 trainer.max_steps=20 \
        +data.code=$PWD/examples/norms.py

metrics.jsonl and TensorBoard then have means over the steps between two log lines, named
train_weights_blocks.0, train_gradients_blocks.0, train_update_blocks.0 and so on. The norm of an
update is usually about 0.001 of the norm of the weights. A gradient norm that falls to zero in the
first layers, or grows there, shows where training fails. Gradients are measured before clipping.

The hook keeps a copy of the weights, which the snapshots include. Do not use it with fsdp, hsdp or
tensor parallelism, where each rank holds only a part of the weights.
"""

import re

import torch
from torch import Tensor

from mingpt_ddp.registry import acts

# Matches the layer in the name of a parameter: blocks.0 in blocks.0.up.weight, head in head.weight.
LAYER = re.compile(r"(.*?\.)?\d+(?=\.)|[^.]+")


def norms(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the 2-norm of each layer.

    Args:
        kind: The first word of the metrics' names: weights, gradients or update.
        tensors: A tensor for each parameter, by the parameter's name.
    """
    by_layer: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        layer = (LAYER.match(name) or [name])[0]
        by_layer.setdefault(f"{kind}_{layer}", []).append(tensor.float().norm())
    return {name: torch.stack(each).norm() for name, each in by_layer.items()}


@acts("gradients")
def gradient_norms(step: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Measure the gradients of a step, averaged over all ranks."""
    return norms("gradients", gradients)


@acts("update")
class UpdateNorms:
    """Measure the weights after each step, and their change since the previous step."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}

    def __call__(self, step: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        change = {name: weights[name] - tensor for name, tensor in self.before.items()}
        self.before = {name: weight.clone() for name, weight in weights.items()}
        return norms("weights", weights) | norms("update", change)

    def state_dict(self) -> dict[str, Tensor]:
        return self.before

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.before = state
