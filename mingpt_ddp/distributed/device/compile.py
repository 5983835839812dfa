"""torch.compile: whether to use it, and its errors as one line."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mingpt_ddp import torch_internals
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.model_config import model_label
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.user_code import is_own_model, is_user_defined
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.distributed.device.device import cpu_kind
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import flops_per_token

BACKEND = "inductor"
COMPILERS = {"cuda": ("CC", ("gcc", "clang", "cc")), "cpu": ("CXX", ("g++", "clang++", "c++"))}
MIN_CAPABILITY = (7, 0)  # of a GPU, for Triton
GRAPHED_FLOPS = 1e13  # of a micro-batch; an H200 computes them in some 25 ms
NOT_COMPILED = ("fsdp", "hsdp")  # strategies with hooks that a graph cannot hold


def should_compile(config: Config, device: torch.device, world_size: int = 1) -> bool:
    """Return whether to compile the model.

    auto: built-in models on a GPU, if all requirements are installed.

    On a CPU compiling takes half a minute for a step at most 10% faster. Only training is compiled,
    into one graph of static shapes; evaluation and sampling have varying shapes and run the same
    weights eagerly. torch caches compiled code in TORCHINDUCTOR_CACHE_DIR, by default in the
    directory for temporary files, in a subdirectory for each kind of CPU.

    Args:
        world_size: ranks that train.

    Raises:
        ConfigError: trainer.compile cannot work on this machine.
    """
    wanted = config.trainer.compile
    if not allows_compile(config, device, world_size):
        return False
    missing = _missing_requirement(device) if wanted else None
    if wanted == "auto":
        is_own = is_own_model(config.model)
        return device.type == "cuda" and not is_own and missing is None
    if missing is not None:
        raise ConfigError(
            f"trainer.compile={str(wanted).lower()} needs {missing} on this machine; "
            "set it to false"
        )
    if wanted == "cuda_graphs" and device.type != "cuda":
        raise ConfigError("trainer.compile=cuda_graphs needs a GPU; set it to auto")
    return bool(wanted)


def allows_compile(config: Config, device: torch.device, world_size: int) -> bool:
    """Return whether the other keys allow to compile the model, wherever it is trained.

    Raises:
        ConfigError: they do not, and trainer.compile asks for it.
    """
    wanted = config.trainer.compile
    if config.ddp.strategy in NOT_COMPILED:
        if wanted not in ("auto", False):
            raise ConfigError(
                f"trainer.compile={str(wanted).lower()} does not work with "
                f"ddp.strategy={config.ddp.strategy}; set it to false, or use ddp.strategy=zero1"
            )
        return False
    needed = _needed_setting(config.ddp, device, world_size)
    if needed is None:
        return True
    if wanted in (True, "cuda_graphs"):
        raise ConfigError(f"trainer.compile={str(wanted).lower()} needs {needed}; set one of them")
    return False


def _needed_setting(ddp: DDPConfig, device: torch.device, world_size: int) -> str | None:
    """Return a setting that compiling into one graph needs and the configuration lacks."""
    if ddp.tensor_parallel > 1:
        return "ddp.tensor_parallel=1"
    if ddp.reduction == "canonical":
        return "ddp.reduction=fast"
    # torch's SyncBatchNorm indexes with a mask, so shapes depend on values. On one rank it computes
    # the plain normalization, which has static shapes.
    if ddp.sync_batchnorm and device.type == "cuda" and world_size > 1:
        return "ddp.sync_batchnorm=false on several GPUs"
    return None


def _missing_requirement(device: torch.device) -> str | None:
    """Return a requirement of torch.compile that this machine lacks; None if it lacks none."""
    variable, programs = COMPILERS[device.type]
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton"
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return "a GPU of compute capability 7.0"
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        return f"a compiler ({' or '.join(programs[:2])})"
    return None


def check_compiles(model: nn.Module, config: Config, call: Callable[[nn.Module], object]) -> None:
    """Capture the graph of the model without generating code.

    Args:
        call: calls the model that it receives.

    Raises:
        ConfigError: torch cannot capture the model as one graph.
    """
    with report_compile_errors(config):
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
        call(compiled)


def replays_graphs(config: Config, model: nn.Module, plan: BatchPlan) -> bool:
    """Return whether a compiled model is replayed from CUDA graphs.

    auto: built-in models and tasks on one GPU, where a step is one micro-batch whose kernels take
    less time than their launches. 10.7M parameters train 3.5 times as fast on an H200.

    Raises:
        CodeError: the model's count of FLOPs is not a number above 0.
    """
    if config.trainer.compile != "auto":
        return config.trainer.compile == "cuda_graphs"
    if plan.n_micro > 1 or plan.world_size > 1 or is_user_defined("task", config.task.name):
        return False
    flops = flops_per_token(model)
    context = getattr(model, "block_size", None)
    if flops is None or context is None:
        return False
    return flops * context * plan.batch_size < GRAPHED_FLOPS


def compile_model(
    model: nn.Module, device: torch.device, deterministic: bool, graphs: bool
) -> nn.Module:
    """Return the model compiled into one graph; the first call compiles.

    Args:
        deterministic: choose kernels without timing them.
        graphs: replay its kernels from CUDA graphs, without a launch each.
    """
    torch_internals.compile_deterministically(deterministic)
    if device.type == "cpu":
        _keep_code_of_cpus_apart()
    mode = "reduce-overhead" if graphs else None
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, mode=mode, backend=BACKEND)
    return cast(nn.Module, compiled)


def _keep_code_of_cpus_apart() -> None:
    """Let torch cache compiled code in a directory for this kind of CPU.

    Its keys lack the vector instructions: machines that share a directory, or one run after a
    change of ATEN_CPU_CAPABILITY, load code whose results are NaN.
    """
    shared = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    directory = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared))
    kind = cpu_kind()
    if directory.name != kind:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / kind)


@contextmanager
def report_compile_errors(config: Config) -> Iterator[None]:
    """Raise errors of torch.compile as a ConfigError of one line."""
    try:
        yield
    except torch_internals.compile_error() as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"trainer.compile={str(config.trainer.compile).lower()}: torch cannot compile "
            f"the model {model_label(config.model)}; set it to false ({reason})"
        ) from error
