"""Choose and set up the device of a rank, and read its memory."""

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
from mingpt_ddp.distributed.device.machine import usable_memory
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.ops import resolve_device, resolve_precision
from mingpt_ddp.process.env import DistEnv, has_parent_launcher

# A RuntimeError of torch contains one of these texts if memory ran out. In this order, they come
# from CUDA and NCCL, from cuBLAS and cuDNN, from the CPU allocator, and from C++.
OUT_OF_MEMORY_TEXTS = ("out of memory", "status_alloc_failed", "can't allocate memory", "bad_alloc")
# Options of mallopt, from <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20  # glibc allocates larger blocks with mmap
TRIM_THRESHOLD_BYTES = 1 << 30  # amount of freed memory that the process keeps


def device_of_rank(trainer: TrainerConfig, ddp: DDPConfig, env: DistEnv) -> torch.device:
    """Choose the device of this rank, and check that this machine can run the configuration.

    Raises:
        ConfigError: This machine or this build of torch lacks a device, a backend or an option.
    """
    on_gpu = resolve_device(trainer.device, "trainer.device").type == "cuda"
    if ddp.backend == "nccl" and not on_gpu:
        raise ConfigError("ddp.backend=nccl needs a GPU and there is none; use ddp.backend=gloo")
    if ddp.backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            "ddp.backend=mpi does not work, because this torch is built without MPI; use "
            "ddp.backend=gloo"
        )
    if not on_gpu:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    # A scheduler may show each process only its own GPU. Workers that have the same parent see the
    # same GPUs, because they inherit its CUDA_VISIBLE_DEVICES.
    sees_gpus_of_other_ranks = gpus > 1 or has_parent_launcher()
    index = env.local_rank if sees_gpus_of_other_ranks else 0
    if index < gpus or ddp.backend == "gloo":  # gloo's ranks may share a GPU
        return torch.device("cuda", index % gpus)
    raise ConfigError(
        f"local rank {index} has no GPU, because this machine has {gpus}; start {gpus} ranks, "
        "use the CPU, or let ranks share GPUs with ddp.backend=gloo"
    )


def precision_of_run(config: Config, device: torch.device, state: Any = None) -> str:
    """Return the precision of a run: fp32, bf16 or fp16.

    On a CPU, trainer.precision=auto means fp32 for a user's own model, unless the run began in
    bf16.

    Args:
        state: The state.json of the snapshot that the run resumes from. It is untrusted. None if
            there is no snapshot.
    """
    if chooses_fp32(config, device) and not _began_in_bf16(state):
        return "fp32"
    return resolve_precision(config.trainer.precision, device)


def chooses_fp32(config: Config, device: torch.device) -> bool:
    """Return True if trainer.precision=auto avoids bf16 on this CPU for a user's own model.

    On CPUs, some kernels are slow in bf16, such as the backward pass of torch's fused attention.
    The built-in models do not use such kernels.
    """
    if config.trainer.precision != "auto" or device.type != "cpu":
        return False
    is_own = is_user_defined("model", config.model.architecture)
    return is_own and resolve_precision("auto", device) == "bf16"


def _began_in_bf16(state: Any) -> bool:
    try:
        return bool(state["environment"]["precision"] == "bf16")
    except (LookupError, TypeError):  # there is no snapshot, or it does not name a precision
        return False


def refuse_shared_gpus(gpus: list[str]) -> None:
    """Check that each rank has a GPU of its own, as NCCL requires.

    NCCL would also raise an error, but one that is hard to understand.

    Args:
        gpus: UUID of the GPU of each rank, in rank order.

    Raises:
        ConfigError: Two ranks have the same GPU.
    """
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise ConfigError(
                f"ranks {gpus.index(gpu)} and {rank} have the same GPU; "
                "give each rank its own GPU with LOCAL_RANK or CUDA_VISIBLE_DEVICES, or use "
                "ddp.backend=gloo"
            )


def set_up_device(device: torch.device, deterministic: bool) -> None:
    """Make the device current in this process, with deterministic kernels if requested."""
    # Call the setter only if the value changes, because it imports modules, which takes a second.
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)
        # Filling uninitialized memory takes a kernel per tensor and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
    if device.type == "cuda":
        # cuBLAS reads this variable only once, at the first matrix product. Set it even if this job
        # is not deterministic, because a later job in this process may be.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.init()  # from now on torch.manual_seed also seeds the generator of the GPU
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()


def keep_freed_memory(mmap_threshold: int = MMAP_THRESHOLD_BYTES) -> None:
    """Keep freed memory in the process, so that its next step can use it again.

    By default glibc returns freed memory to the kernel, which zeroes every page when the next step
    allocates it again. This takes up to a quarter of a small model's step on a CPU.

    Does nothing with other C libraries, or if the user has set a MALLOC_ variable.

    Args:
        mmap_threshold: Size in bytes from which a freed block returns to the kernel at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is not None and not is_set_by_user:
        mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the name and vector instructions of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_info('model name')} ({torch.backends.cpu.get_cpu_capability()})"


def cpu_id() -> str:
    """Return a short id of the instruction set that torch may use on this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    instructions = zlib.crc32(_cpu_info("flags").encode())
    return f"{capability.lower()}-{instructions:08x}"


def _cpu_info(field: str) -> str:
    """Return a field of the first core in /proc/cpuinfo, or the architecture if it is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(field):
                return line.partition(": ")[2]
    return platform.machine()


def total_memory(device: torch.device) -> int:
    """Return the size of the GPU's memory in bytes, or `usable_memory` for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return usable_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error says that memory ran out, on the GPU or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(text in message for text in OUT_OF_MEMORY_TEXTS)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: GPU memory if it has a GPU, else RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
