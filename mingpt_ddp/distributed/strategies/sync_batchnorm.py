"""Batch normalization over all ranks, with torch's class on GPUs and a user's class on CPUs."""

from typing import cast

import torch
from torch import nn

from mingpt_ddp.errors import ConfigError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Attribute of a user's batch normalization: True if it computes its statistics over all ranks.
# Training on CPUs with ddp.sync_batchnorm=true sets it. The dry run on rank zero alone does not.
OVER_ALL_RANKS = "over_all_ranks"


def check_batchnorm(model: nn.Module) -> None:
    """Refuse batch normalizations whose statistics CPUs cannot compute over several ranks.

    Raises:
        ConfigError: The model has such a module. The message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and not hasattr(module, OVER_ALL_RANKS):
            raise ConfigError(
                f"ddp.sync_batchnorm=true needs GPUs for {name}, a {type(module).__name__} of "
                "torch; on CPUs use the class BatchNorm of examples/digits/digits.py, or set "
                "ddp.sync_batchnorm=false"
            )


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Make the batch normalizations compute their statistics over all ranks. Return the model."""
    if device.type == "cuda":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    for module in model.modules():
        if hasattr(module, OVER_ALL_RANKS):
            setattr(module, OVER_ALL_RANKS, True)
    return model
