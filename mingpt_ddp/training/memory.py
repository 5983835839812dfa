"""Refuse a run that does not fit into memory, because a restart would fail in the same way."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.device.device import is_out_of_memory
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies import check_strategy
from mingpt_ddp.errors import ConfigError

SMALLER_MODEL_ADVICE = "choose a smaller model"
# A run that does not fit into memory fails within this many steps. The first step creates the state
# of the optimizer, and the second one is the first to run its passes with that state in memory.
FIRST_STEPS = 2


@contextmanager
def refuse_out_of_memory(
    config: Config, runtime: Runtime, subject: str, advice: str = "lower trainer.micro_batch_size"
) -> Iterator[None]:
    """In this context, turn an out-of-memory error into a ConfigError with advice.

    Args:
        config: The whole configuration.
        runtime: The runtime of this rank.
        subject: Subject of the message: the model or the batch that does not fit into memory.
        advice: The first change that the message suggests.

    Raises:
        ConfigError: Memory has run out. The message names the keys to change.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        changes = [advice]
        if not config.trainer.activation_checkpointing:
            changes.append("set trainer.activation_checkpointing=true")
        if _could_shard(config, runtime):
            changes.append("set ddp.strategy=fsdp")
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{subject} does not fit into the memory of rank {runtime.group.rank}; "
            f"{', or '.join(changes)} ({reason})"
        ) from error


def _could_shard(config: Config, runtime: Runtime) -> bool:
    """Return True if ddp.strategy=fsdp is possible and would shard the model over the ranks."""
    group = runtime.group
    if group.world_size == 1 or runtime.strategy.weights != "whole":
        return False
    with suppress(ConfigError):
        check_strategy(replace(config, ddp=replace(config.ddp, strategy="fsdp")), group.world_size)
        return True
    return False
