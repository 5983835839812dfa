"""Refuse a run that does not fit into memory: a restart would fail again."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.device.device import is_out_of_memory
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies import check_strategy
from mingpt_ddp.errors import ConfigError

SMALLER_MODEL_ADVICE = "choose a smaller model"
# In the first steps of an attempt memory may run out. The first step creates the optimizer's state,
# and the second step is the first one that trains with it.
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
