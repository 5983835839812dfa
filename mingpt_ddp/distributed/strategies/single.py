"""The strategy single: one rank trains the model itself, compiled if requested."""

from dataclasses import replace
from typing import final

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed.strategies.base import Strategy


def for_one_rank(ddp: DDPConfig) -> DDPConfig:
    """Return these settings, changed so that one rank can train alone."""
    return replace(
        ddp,
        strategy="single",
        reduction="fast",
        tensor_parallel=1,
        comm_hook="none",
        sync_batchnorm=False,
    )


@final
class SingleStrategy(Strategy):
    """Train on one rank."""

    allows_several_devices = True
