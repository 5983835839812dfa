"""Activation checkpointing: memory for time, where a model does not fit.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from mingpt_ddp.errors import ConfigError


def apply_activation_checkpointing(model: nn.Module) -> None:
    """From now on only the input of each of `model.blocks` is kept, and the backward pass works out the rest anew.

    Dropout is drawn as it was, so that gradients are the same bit for bit. Nothing changes where there are no
    gradients, nor do the names of parameters.

    Raises:
        ConfigError: the model has no `blocks`.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            f"trainer.activation_checkpointing=true needs a model with blocks, an nn.ModuleList, and "
            f"{type(model).__name__} has none; set it to false"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
