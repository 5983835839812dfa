"""Decide whether to use torch.compile, compile the model, and report its errors in one line."""

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
from mingpt_ddp.config.user_code import is_custom_model, is_user_defined
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.distributed.device.device import cpu_id
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import flops_per_token

BACKEND = "inductor"
# For each type of device: the environment variable that names the compiler, and its usual programs.
COMPILERS = {"cuda": ("CC", ("gcc", "clang", "cc")), "cpu": ("CXX", ("g++", "clang++", "c++"))}
MIN_COMPUTE_CAPABILITY = (7, 0)  # Triton does not support older GPUs
# CUDA graphs pay off only if a micro-batch needs fewer FLOPs than this, about 25 ms on an H200.
MAX_GRAPHED_FLOPS = 1e13
# These strategies use hooks, which torch cannot compile into the graph of the model.
UNCOMPILED_STRATEGIES = ("fsdp", "hsdp")


def should_compile(config: Config, device: torch.device, world_size: int = 1) -> bool:
    """Return True if the model should be compiled for training.

    With trainer.compile=auto, compile built-in models on a GPU if this machine has everything that
    torch.compile needs. Do not compile on a CPU: it takes half a minute, and makes a step at most
    10% faster.

    Only training is compiled, into one graph of static shapes. Evaluation and sampling have varying
    shapes, so they run the same weights without the graph. Torch caches compiled code in
    TORCHINDUCTOR_CACHE_DIR, which is by default in the directory for temporary files. Each type of
    CPU has a subdirectory there.

    Args:
        world_size: Number of ranks that train.

    Raises:
        ConfigError: trainer.compile requests compilation, which cannot work on this machine.
    """
    wanted = config.trainer.compile
    if not allows_compile(config, device, world_size):
        return False
    missing = _missing_requirement(device) if wanted else None
    if wanted == "auto":
        is_custom = is_custom_model(config.model)
        return device.type == "cuda" and not is_custom and missing is None
    if missing is not None:
        raise ConfigError(
            f"trainer.compile={str(wanted).lower()} needs {missing} on this machine; "
            "set it to false"
        )
    if wanted == "cuda_graphs" and device.type != "cuda":
        raise ConfigError("trainer.compile=cuda_graphs needs a GPU; set it to auto")
    return bool(wanted)


def allows_compile(config: Config, device: torch.device, world_size: int) -> bool:
    """Return True if the other settings allow compilation. This does not check the machine.

    Raises:
        ConfigError: trainer.compile requests compilation, but another setting rules it out.
    """
    wanted = config.trainer.compile
    if config.ddp.strategy in UNCOMPILED_STRATEGIES:
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
        raise ConfigError(
            f"trainer.compile={str(wanted).lower()} needs {needed}; change one of the two settings"
        )
    return False


def _needed_setting(ddp: DDPConfig, device: torch.device, world_size: int) -> str | None:
    """Return a setting that compilation into one graph needs, but the configuration lacks.

    Return None if nothing is missing.
    """
    if ddp.tensor_parallel > 1:
        return "ddp.tensor_parallel=1"
    if ddp.reduction == "canonical":
        return "ddp.reduction=fast"
    # Torch's SyncBatchNorm indexes with a mask, so its shapes depend on values. On a single rank it
    # computes the plain normalization, which has static shapes.
    if ddp.sync_batchnorm and device.type == "cuda" and world_size > 1:
        return "ddp.sync_batchnorm=false on several GPUs"
    return None


def _missing_requirement(device: torch.device) -> str | None:
    """Name something that torch.compile needs and this machine lacks. Return None if nothing."""
    variable, programs = COMPILERS[device.type]
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton"
        if torch.cuda.get_device_capability(device) < MIN_COMPUTE_CAPABILITY:
            return "a GPU of compute capability 7.0 or higher"
    if not os.environ.get(variable) and not any(map(shutil.which, programs)):
        return f"a compiler ({' or '.join(programs[:2])})"
    return None


def check_compiles(model: nn.Module, config: Config, call: Callable[[nn.Module], object]) -> None:
    """Check that torch can capture the model as one graph. No code is generated.

    Args:
        call: Receives the compiled model and calls it with an input.

    Raises:
        ConfigError: Torch cannot capture the model as one graph.
    """
    with report_compile_errors(config):
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
        call(compiled)


def replays_graphs(config: Config, model: nn.Module, plan: BatchPlan) -> bool:
    """Return True if the compiled model should be replayed from CUDA graphs.

    With trainer.compile=auto, use CUDA graphs for built-in models and tasks on one GPU, if a step
    is one micro-batch that is so small that launching its kernels takes longer than running them. A
    model of 10.7M parameters then trains 3.5 times as fast on an H200.

    Raises:
        CodeError: The number of FLOPs that the model reports is not above 0.
    """
    if config.trainer.compile != "auto":
        return config.trainer.compile == "cuda_graphs"
    if plan.n_micro > 1 or plan.world_size > 1 or is_user_defined("task", config.task.name):
        return False
    flops = flops_per_token(model)
    context = getattr(model, "block_size", None)
    if flops is None or context is None:
        return False
    return flops * context * plan.batch_size < MAX_GRAPHED_FLOPS


def compile_model(
    model: nn.Module, device: torch.device, deterministic: bool, graphs: bool
) -> nn.Module:
    """Wrap the model so that its first call compiles it into one graph.

    Args:
        deterministic: Choose kernels without timing them.
        graphs: Replay the kernels from CUDA graphs, instead of launching each of them.
    """
    torch_internals.compile_deterministically(deterministic)
    if device.type == "cpu":
        _cache_code_by_cpu()
    mode = "reduce-overhead" if graphs else None
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, mode=mode, backend=BACKEND)
    return cast(nn.Module, compiled)


def _cache_code_by_cpu() -> None:
    """Let torch cache compiled code in a directory for this type of CPU.

    Torch's cache keys do not contain the vector instructions of the CPU. If different machines
    share a cache directory, or if ATEN_CPU_CAPABILITY changes, then torch loads code whose results
    are NaN.
    """
    shared = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    directory = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared))
    cpu = cpu_id()
    if directory.name != cpu:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / cpu)


@contextmanager
def report_compile_errors(config: Config) -> Iterator[None]:
    """Turn errors of torch.compile into a ConfigError with a one-line message."""
    try:
        yield
    except torch_internals.compile_error() as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"trainer.compile={str(config.trainer.compile).lower()}: torch cannot compile "
            f"the model {model_label(config.model)}; set it to false ({reason})"
        ) from error
