"""The device of a rank: its choice, deterministic kernels, and memory."""

import contextlib
import ctypes
import os
import platform
import resource
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.config.user_code import is_user_defined
from mingpt_ddp.distributed.device.machine import installed_memory
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.ops import resolve_device, resolve_precision
from mingpt_ddp.process.env import DistEnv, has_parent_launcher

# In a RuntimeError of torch: of CUDA and NCCL, cuBLAS and cuDNN, the CPU's allocator, C++.
OUT_OF_MEMORY = ("out of memory", "status_alloc_failed", "can't allocate memory", "bad_alloc")
M_TRIM_THRESHOLD = -1  # of <malloc.h>
M_MMAP_THRESHOLD = -3  # of <malloc.h>
MMAP_THRESHOLD = 32 << 20  # bytes: glibc mmaps larger blocks
TRIM_THRESHOLD = 1 << 30  # bytes of freed memory to keep in the process


def device_of_rank(trainer: TrainerConfig, ddp: DDPConfig, env: DistEnv) -> torch.device:
    """Return the device of this rank; check that this machine can run the configuration.

    Raises:
        ConfigError: this machine or this build of torch lacks a device, backend or option.
    """
    on_gpu = resolve_device(trainer.device, "trainer.device").type == "cuda"
    if ddp.backend == "nccl" and not on_gpu:
        raise ConfigError("ddp.backend=nccl needs a GPU and there is none; use ddp.backend=gloo")
    if ddp.backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            "ddp.backend=mpi, but this torch is built without MPI; use ddp.backend=gloo"
        )
    if not on_gpu:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    # A scheduler may expose to each process its own GPUs; the workers of one parent have the same
    # CUDA_VISIBLE_DEVICES.
    sees_those_of_others = gpus > 1 or has_parent_launcher()
    index = env.local_rank if sees_those_of_others else 0
    if index < gpus or ddp.backend == "gloo":  # gloo's ranks may share a GPU
        return torch.device("cuda", index % gpus)
    raise ConfigError(
        f"local rank {index} has no GPU, this machine has {gpus}; start {gpus} ranks, "
        "use the CPU, or let ranks share GPUs with ddp.backend=gloo"
    )


def precision_of_run(config: Config, device: torch.device, state: Any = None) -> str:
    """Return the precision of a run: fp32, bf16 or fp16.

    On a CPU auto is fp32 for a user's own model, unless the run began in bf16.

    Args:
        state: of the snapshot that the run resumes from, untrusted; None without one.
    """
    if chooses_fp32(config, device) and not _began_in_bf16(state):
        return "fp32"
    return resolve_precision(config.trainer.precision, device)


def chooses_fp32(config: Config, device: torch.device) -> bool:
    """Return whether auto leaves out the bf16 of this CPU, because the model is a user's own.

    The backward pass of torch's fused attention, for one, is slow in it; the built-in models have
    other kernels.
    """
    if config.trainer.precision != "auto" or device.type != "cpu":
        return False
    is_own = is_user_defined("model", config.model.architecture)
    return is_own and resolve_precision("auto", device) == "bf16"


def _began_in_bf16(state: Any) -> bool:
    try:
        return bool(state["environment"]["precision"] == "bf16")
    except (LookupError, TypeError):  # there is none
        return False


def refuse_shared_gpus(gpus: list[str]) -> None:
    """Check that each rank has its own GPU, as NCCL requires; its own error is hard to understand.

    Args:
        gpus: the UUIDs of the GPUs, in the order of the ranks.

    Raises:
        ConfigError: two ranks have the same GPU.
    """
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise ConfigError(
                f"ranks {gpus.index(gpu)} and {rank} have the same GPU; "
                "give each its own by LOCAL_RANK or CUDA_VISIBLE_DEVICES, or use ddp.backend=gloo"
            )


def set_up_device(device: torch.device, deterministic: bool) -> None:
    """Make the device current in this process, with deterministic kernels if requested."""
    # Set only what differs: the setter takes a second to import modules.
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)
        # Filling uninitialized memory takes a kernel per tensor and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
    if device.type == "cuda":
        # Read once, at the first product: a later job may need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.init()  # from now on torch.manual_seed seeds its generator too
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()


def keep_freed_memory(mmap_threshold: int = MMAP_THRESHOLD) -> None:
    """Keep freed memory in the process for its next step.

    By default glibc returns it to the kernel, which zeroes every page when the next step allocates
    again: up to a quarter of a small model's step on a CPU. A no-op with other C libraries and if
    MALLOC_ variables are set.

    Args:
        mmap_threshold: bytes of the smallest block that is returned at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is not None and not is_set_by_user:
        mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with the vector instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_info('model name')} ({torch.backends.cpu.get_cpu_capability()})"


def cpu_kind() -> str:
    """Return a short name of the instructions that torch may use on this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    instructions = zlib.crc32(_cpu_info("flags").encode())
    return f"{capability.lower()}-{instructions:08x}"


def _cpu_info(field: str) -> str:
    """Return a field of /proc/cpuinfo, of the first core; the architecture where it is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(field):
                return line.partition(": ")[2]
    return platform.machine()


def total_memory(device: torch.device) -> int:
    """Return the memory of a GPU in bytes, or for a CPU the `installed_memory`."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return installed_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that an allocation has failed, on a GPU or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(text in message for text in OUT_OF_MEMORY)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of a GPU, or of the resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
