"""Load the example of a model that places its own layers, for tests of its internals."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import yaml
from example_files import EXAMPLES

from mingpt_ddp.config.builders import BUILDERS, run_file
from mingpt_ddp.config.config import Config, build_group

EXAMPLE = EXAMPLES / "model_parallel.py"


def with_example(config: Config) -> Config:
    """Return a configuration with examples/model_parallel.py as its model."""
    run_file(EXAMPLE, "model.code")
    preset = yaml.safe_load((EXAMPLES / "model" / "model_parallel.yaml").read_text())
    return dataclasses.replace(config, model=build_group("model", preset))


@contextmanager
def placed_on(devices: list[torch.device]) -> Iterator[None]:
    """Let the example place its layers on these devices instead of the GPUs of its rank."""
    module = sys.modules[BUILDERS["model"]["model_parallel"].__module__]
    with mock.patch.object(module, "gpus_of_rank", lambda first: devices):
        yield
