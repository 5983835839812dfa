"""torch.compile around the training step: one graph of static shapes, and one line for what cannot be compiled.

Only training is compiled. Evaluation and sampling, whose shapes vary, call the same weights eagerly. Compiled code is
kept between runs where torch keeps it, in TORCHINDUCTOR_CACHE_DIR or the directory for temporary files.
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
LONGEST = 300  # characters of what torch says
COMPILERS = {"cuda": ("CC", ("gcc", "clang", "cc")), "cpu": ("CXX", ("g++", "clang++", "c++"))}
OLDEST_GPU = (7, 0)  # compute capability for which Triton makes code


def should_compile(config: Config, device: torch.device) -> bool:
    """Whether the run is compiled. auto: on a GPU, our own models, where there is what it takes.

    On a CPU it makes a step 10% faster at best, and costs half a minute.

    Raises:
        ConfigError: it should be, but cannot.
    """
    wanted = config.trainer.compile
    if wanted == "auto":
        return device.type == "cuda" and config.model.code is None and _missing(device) is None
    missing = _missing(device) if wanted else None
    if missing is not None:
        raise ConfigError(f"trainer.compile={_shown(config)} needs {missing} on this machine; set it to false")
    if wanted == "cuda_graphs" and device.type != "cuda":
        raise ConfigError("trainer.compile=cuda_graphs needs a GPU; set it to auto")
    return bool(wanted)


def _missing(device: torch.device) -> str | None:
    """What torch's compiler would look for in vain."""
    variable, programs = COMPILERS[device.type]
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton"
        if torch.cuda.get_device_capability(device) < OLDEST_GPU:
            return "a GPU of compute capability 7.0"
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        return f"a compiler ({' or '.join(programs[:2])})"
    return None


def compile_model(model: nn.Module, config: Config) -> nn.Module:
    """The model, to be compiled when it is first called; `model` itself stays eager."""
    mode = "reduce-overhead" if config.trainer.compile == "cuda_graphs" else None
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False, mode=mode, backend=BACKEND))


def check_compiles(model: nn.Module, config: Config, x: Tensor, y: Tensor) -> None:
    """
    Raises:
        ConfigError: torch cannot make one graph of the model.
    """
    with report_compile_errors(config):
        torch.compile(model, fullgraph=True, dynamic=False, backend="eager")(x, y)


@contextlib.contextmanager
def report_compile_errors(config: Config) -> Iterator[None]:
    """
    Raises:
        ConfigError: compiling fails.
    """
    try:
        yield
    except compile_error() as error:
        told = " ".join(str(error).split())[:LONGEST]
        raise ConfigError(
            f"trainer.compile={_shown(config)}: torch cannot compile the model {config.model.architecture}; set it to "
            f"false ({told})"
        ) from error


def _shown(config: Config) -> str:
    return str(config.trainer.compile).lower()
