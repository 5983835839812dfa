"""What the Python files of users import: `from mingpt_ddp.registry import ModelConfig, register`."""

from mingpt_ddp.config.registry import *  # noqa: F403
