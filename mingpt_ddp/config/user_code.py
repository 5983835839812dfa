"""Which parts of a configuration are a user's."""

from mingpt_ddp.config.components import DatasetConfig
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.model_config import ModelConfig, changed_parts
from mingpt_ddp.config.registry import BUILDERS


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
