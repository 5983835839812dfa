"""Optimizers, selected by `optimizer.name`; lr_schedule.py has the learning rate.

A second rule for some parameters is one optimizer with several parameter groups: muon.py is the
example. The rate of a group is that of the run times its `lr_ratio`.
"""

from typing import Any

import torch
from torch import nn

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.optimizer_config import AdamWConfig, OptimizerConfig, SGDConfig
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models.dtensor import is_dtensor
from mingpt_ddp.optim.muon import Muon


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: weight decay for matrices, none for vectors (biases, norms)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer that `config` describes.

    The train step sets the learning rate before every step.

    Raises:
        CodeError: the user's builder returned something other than a torch.optim.Optimizer.
    """
    build = BUILDERS["optimizer"][config.name]
    optimizer = build(model, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CodeError(
            f"{config.name} must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    return optimizer


def _adamw(model: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _sgd(model: nn.Module, config: SGDConfig) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    is_sharded = any(map(is_dtensor, model.parameters()))
    return torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=not is_sharded,  # the fused kernel takes no sharded tensors
    )


BUILDERS["optimizer"].update(adamw=_adamw, muon=Muon, sgd=_sgd)
