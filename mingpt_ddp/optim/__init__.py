"""Build the optimizer that `optimizer.name` selects. lr_schedule.py sets its learning rate.

If parameters need different update rules, build one optimizer with several parameter groups, as
muon.py does. The learning rate of a group is the learning rate of the run, times the group's
`lr_ratio`.

The configuration keys of the built-in optimizers are in config/keys/optimizer_config.py. Their
builders are here, with the declarations of the state that they keep (state.py).
"""

from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.optimizer_config import AdamWConfig, OptimizerConfig, SGDConfig
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models.dtensor import is_dtensor
from mingpt_ddp.optim.eager import SGD, AdamW
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.optim.state import State, declare_state

__all__ = ["build_optimizer", "decay_groups", "declare_state"]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay; biases and norms without it."""
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
        CodeError: A user's builder returned something other than a torch.optim.Optimizer.
    """
    build = BUILDERS["optimizer"][config.name]
    optimizer = build(model, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CodeError(
            f"the optimizer {config.name} must be a torch.optim.Optimizer, not "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def _adamw(model: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


@declare_state(AdamW)
@declare_state(torch.optim.AdamW)
def _adamw_state(parameter: Tensor, group: dict[str, Any]) -> State:
    moments = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        moments.append("max_exp_avg_sq")
    state = {name: torch.zeros_like(parameter) for name in moments}
    return {"step": torch.zeros((), dtype=torch.float32), **state}


def _sgd(model: nn.Module, config: SGDConfig) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    is_sharded = any(map(is_dtensor, model.parameters()))
    return SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=not is_sharded,  # the fused kernel does not support sharded tensors
    )


@declare_state(SGD)
@declare_state(torch.optim.SGD)
def _sgd_state(parameter: Tensor, group: dict[str, Any]) -> State:
    return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


BUILDERS["optimizer"].update(adamw=_adamw, muon=Muon, sgd=_sgd)
