"""Find the parts of a configuration that come from a user's code, and check their signatures."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.model_config import ModelConfig, changed_parts
from mingpt_ddp.errors import CodeError


def is_user_defined(group: str, name: str) -> bool:
    """Return True if a user's file has registered this name."""
    return BUILDERS[group][name].__module__.split(".")[0] != __name__.split(".")[0]


def is_custom_model(model: ModelConfig) -> bool:
    """Return True if a model is not exactly a built-in architecture.

    Either a user's file defines the whole model, or some parts of its blocks are not the standard
    parts of the architecture.

    The constructor of such a model may compute buffers, and may need any amount of memory.
    """
    return is_user_defined("model", model.architecture) or bool(changed_parts(vars(model)))


def uses_user_code(config: Config) -> bool:
    """Return True if code of a user computes a part of a training step, or acts on it as a hook."""
    if config.optimizer.schedule in BUILDERS["schedule"] or BUILDERS["action"]:
        return True
    # Every dataset of samples is a user's own, because none is built in.
    if isinstance(config.data, DatasetConfig) or is_custom_model(config.model):
        return True
    chosen = {"task": config.task.name, "optimizer": config.optimizer.name}
    return any(is_user_defined(kind, name) for kind, name in chosen.items())


def check_takes(function: Callable[..., Any], arguments: Sequence[str], label: str) -> None:
    """Check that a user's function can be called with these arguments.

    Args:
        arguments: Names of the arguments, for the message.
        label: Name of the function in the message.

    Raises:
        CodeError: The function cannot be called with these arguments.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:  # ValueError: the function is not written in Python
        wanted = ", ".join(arguments)
        raise CodeError(f"{label} must take ({wanted}): {error}") from error
