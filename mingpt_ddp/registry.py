"""The API for users' Python files: `from mingpt_ddp.registry import ModelConfig, register`."""

from mingpt_ddp.config.hooks import acts, on  # noqa: F401
from mingpt_ddp.config.registry import *  # noqa: F403
