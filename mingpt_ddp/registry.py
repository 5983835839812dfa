"""The API for users' Python files: `from mingpt_ddp.registry import ModelConfig, register`."""

from mingpt_ddp.config.builders import *  # noqa: F403
from mingpt_ddp.config.hook_decorators import acts as acts
from mingpt_ddp.config.hook_decorators import on as on
from mingpt_ddp.config.keys.components import ClassesConfig as ClassesConfig
