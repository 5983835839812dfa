"""Strategies: how several ranks train one model. `ddp.strategy` selects one.

base.py describes the methods of a strategy. Each strategy has a file of its own.
"""

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.distributed.strategies.canonical import (
    CanonicalStrategy,
    CanonicalZero1Strategy,
    check_canonical,
)
from mingpt_ddp.distributed.strategies.ddp import DDPStrategy
from mingpt_ddp.distributed.strategies.single import SingleStrategy
from mingpt_ddp.distributed.strategies.zero1 import Zero1Strategy
from mingpt_ddp.errors import ConfigError

MIN_HSDP_RANKS = 4


def check_strategy(config: Config, world_size: int) -> None:
    """Refuse a strategy that does not fit the number of ranks or the optimizer.

    Raises:
        ConfigError: The strategy does not fit. The message names the key to change.
    """
    name = config.ddp.strategy
    if config.ddp.reduction == "canonical":
        check_canonical(config.ddp, config.trainer)
    if name == "single" and world_size > 1:
        raise ConfigError(
            f"ddp.strategy=single trains in one process, not {world_size} ranks; use "
            "ddp.strategy=ddp"
        )
    if name == "hsdp" and world_size < MIN_HSDP_RANKS:
        raise ConfigError(
            f"ddp.strategy=hsdp needs at least {MIN_HSDP_RANKS} ranks, not {world_size}; use "
            "ddp.strategy=fsdp"
        )
    if name in ("fsdp", "hsdp") and config.optimizer.needs_whole_matrices:
        raise ConfigError(
            f"optimizer.name={config.optimizer.name} needs whole matrices, which "
            f"ddp.strategy={name} splits; use ddp.strategy=zero1"
        )


def build_strategy(
    ddp: DDPConfig,
    trainer: TrainerConfig,
    device: torch.device,
    group: ProcessGroup,
    compiles: bool,
) -> Strategy:
    """Build the strategy that `check_strategy` accepted. On one rank every strategy is `single`.

    Raises:
        ConfigError: The nodes do not have the ranks that hsdp needs.
    """
    strategy = strategy_class(ddp, group.world_size)
    return strategy(ddp, trainer, device, group, compiles)


def strategy_class(ddp: DDPConfig, world_size: int) -> type[Strategy]:
    """Return the class of a strategy. Its attributes describe which tensors a rank holds."""
    name = ddp.strategy
    if ddp.reduction == "canonical":
        is_owned = name == "zero1" and world_size > 1
        return CanonicalZero1Strategy if is_owned else CanonicalStrategy
    if ddp.tensor_parallel > 1:
        from mingpt_ddp.distributed.strategies.tensor_parallel import TensorParallelStrategy

        return TensorParallelStrategy
    if world_size == 1:
        return SingleStrategy
    if name in ("fsdp", "hsdp"):
        from mingpt_ddp.distributed.strategies.fsdp import FSDPStrategy  # takes half a second

        return FSDPStrategy
    return Zero1Strategy if name == "zero1" else DDPStrategy
