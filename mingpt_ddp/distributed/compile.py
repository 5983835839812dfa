"""torch.compile for the training step: one graph of static shapes, and a one-line error for what cannot be compiled.

Only training is compiled. Evaluation and sampling have varying shapes and call the same weights eagerly. torch caches
compiled code in TORCHINDUCTOR_CACHE_DIR, or else in the directory for temporary files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.torch_internals import compile_error

BACKEND = "inductor"
MAX_REASON = 300  # characters of torch's error
COMPILERS = {"cuda": ("CC", ("gcc", "clang", "cc")), "cpu": ("CXX", ("g++", "clang++", "c++"))}
MIN_CAPABILITY = (7, 0)  # of a GPU, for Triton


def should_compile(config: Config, device: torch.device) -> bool:
    """Whether to compile the model. auto: our own models on a GPU, if everything needed is installed.

    On a CPU compiling makes a step 10% faster at best and takes half a minute.

    Raises:
        ConfigError: trainer.compile cannot work on this machine.
    """
    wanted = config.trainer.compile
    if wanted == "auto":
        return device.type == "cuda" and config.model.code is None and _missing_requirement(device) is None
    missing = _missing_requirement(device) if wanted else None
    if missing is not None:
        raise ConfigError(f"trainer.compile={_yaml(wanted)} needs {missing} on this machine; set it to false")
    if wanted == "cuda_graphs" and device.type != "cuda":
        raise ConfigError("trainer.compile=cuda_graphs needs a GPU; set it to auto")
    return bool(wanted)


def _missing_requirement(device: torch.device) -> str | None:
    """Return what torch's compiler needs and this machine lacks."""
    variable, programs = COMPILERS[device.type]
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton"
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return "a GPU of compute capability 7.0"
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        return f"a compiler ({' or '.join(programs[:2])})"
    return None


def compile_model(model: nn.Module, config: Config) -> nn.Module:
    """Return a module that compiles the model at its first call; `model` itself stays eager."""
    mode = "reduce-overhead" if config.trainer.compile == "cuda_graphs" else None
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False, mode=mode, backend=BACKEND))


def check_compiles(model: nn.Module, config: Config, x: Tensor, y: Tensor) -> None:
    """Capture the graph of the model without generating code for it.

    Raises:
        ConfigError: torch cannot make one graph of the model.
    """
    with report_compile_errors(config):
        torch.compile(model, fullgraph=True, dynamic=False, backend="eager")(x, y)


@contextlib.contextmanager
def report_compile_errors(config: Config) -> Iterator[None]:
    """Raise errors of torch.compile as a ConfigError of one line."""
    try:
        yield
    except compile_error() as error:
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise ConfigError(
            f"trainer.compile={_yaml(config.trainer.compile)}: torch cannot compile the model "
            f"{config.model.architecture}; set it to false ({reason})"
        ) from error


def _yaml(value: bool | str) -> str:
    return str(value).lower()
