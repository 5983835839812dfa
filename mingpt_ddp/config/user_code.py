"""Which parts of a configuration are a user's, and whether they can be called."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.model_config import ModelConfig, changed_parts
from mingpt_ddp.errors import CodeError


def is_user_defined(group: str, name: str) -> bool:
    """Return whether a registered name comes from a user's file."""
    return BUILDERS[group][name].__module__.split(".")[0] != __name__.split(".")[0]


def is_own_model(model: ModelConfig) -> bool:
    """Return whether a model, or a part of its blocks, is a user's; or a part is another model's.

    Its constructor may compute buffers, and need any memory.
    """
    return is_user_defined("model", model.architecture) or bool(changed_parts(vars(model)))


def uses_user_code(config: Config) -> bool:
    """Return whether a part of what is trained is a user's, or a hook that acts."""
    if config.optimizer.schedule in BUILDERS["schedule"] or BUILDERS["action"]:
        return True
    if isinstance(config.data, DatasetConfig) or is_own_model(config.model):  # no data is built in
        return True
    chosen = {"task": config.task.name, "optimizer": config.optimizer.name}
    return any(is_user_defined(kind, name) for kind, name in chosen.items())


def check_takes(function: Callable[..., Any], arguments: Sequence[str], label: str) -> None:
    """Check that a user's function can be called with these arguments.

    Raises:
        CodeError: it cannot; names it as the label does.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:  # ValueError: of a function that is not Python's
        wanted = ", ".join(arguments)
        raise CodeError(f"{label} must take ({wanted}): {error}") from error
