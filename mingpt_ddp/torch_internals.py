"""The only module that uses torch internals: private functions and undocumented attributes.

Each function checks that torch has what it uses, and falls back if not.
tests/unit/test_torch_internals.py lists all of it, so that a torch upgrade breaks that test and not
a run.
"""

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

S = TypeVar("S")
PROFILER_MARK = re.compile(rb"^USDT:|gpuGetDeviceCount failed")
FIRST_BUCKET = 1 << 20  # bytes of the first bucket of gradients, whatever ddp.bucket_cap_mb is


# Arithmetic.


def cpu_is_fast_at_bf16() -> bool:
    """Return whether the CPU has bf16 matrix instructions that oneDNN may use. Fallback: False."""
    instructions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_instructions = any(getattr(torch.cpu, check, bool)() for check in instructions)
    return has_instructions and getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()


def for_each(operation: str, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
    """Apply a method such as `mul_` to a list of tensors in few kernels: torch._foreach_mul_.

    Args:
        arguments: of the method; a list or tuple holds one per tensor.

    Fallback: a loop over the tensors.
    """
    fused = getattr(torch, f"_foreach_{operation}", None)
    if fused is not None:
        return fused(tensors, *arguments, **options)
    results = []
    for i, tensor in enumerate(tensors):
        arguments_of_one = [a[i] if isinstance(a, (list, tuple)) else a for a in arguments]
        results.append(getattr(tensor, operation)(*arguments_of_one, **options))
    return tuple(results)


def leave_overflow_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let GradScaler, not the fused kernel, skip a step that overflowed.

    Fallback: it already does.
    """
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


# Inference on a CPU.


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module runs hooks.

    Fallback: True, so that the module is not replaced.
    """
    return any(getattr(module, hooks, True) for hooks in ("_forward_hooks", "_forward_pre_hooks"))


def pack_linear(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, batch: int
) -> Callable[[Tensor], Tensor]:
    """Return a linear layer with its weight packed for its kernel, as Inductor packs frozen ones.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,).
        dtype: of the packed weight. fp16 is FBGEMM's, whose input and output are fp32; other dtypes
            are oneDNN's.
        batch: rows of input to optimize for; other numbers of rows work too.

    Returns:
        A function from (..., inputs) to (..., outputs) of the same dtype.

    Raises:
        AttributeError, RuntimeError: this torch build or CPU lacks the kernel; call `can_pack`
            first.
    """
    if dtype == torch.float16:
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        operation = torch.ops.quantized.linear_dynamic_fp16.default
        return lambda x: operation(x, packed)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), batch)
    operation = torch.ops.mkldnn._linear_pointwise.default
    converted = None if bias is None else bias.to(dtype)
    return lambda x: operation(x.to(dtype), packed, converted, "none", [], "").to(x.dtype)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether `pack_linear` works here, by packing a tiny layer. Fallback: False.

    oneDNN has bf16 only on CPUs with AVX-512 or later.
    """
    weight = torch.ones(2, 2)
    try:
        if dtype == torch.float16 and torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return False  # other engines pack in another format
        linear = pack_linear(weight, None, dtype, 1)
        return linear(weight).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    except (AttributeError, RuntimeError):
        return False


# Training on several ranks.


def time_communication(wrapped: DistributedDataParallel, every: int) -> None:
    """Make DDP time its communication in every n-th backward pass. Fallback: no timing."""
    getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", id)(every)


@dataclass(frozen=True)
class CommunicationTimes:
    """What DDP measured of a reduction of gradients, in seconds."""

    iteration: int  # which backward pass of those that reduce gradients it was, from 1
    total_s: float
    hidden_s: float  # of total_s, while the backward pass computed


def communication_times(model: nn.Module) -> CommunicationTimes:
    """Return the times of the latest timed reduction of gradients.

    Fallback: zeros, which are also the answer for a model without DDP.
    """
    data: dict[str, int] = getattr(model, "_get_ddp_logging_data", dict)()
    total_ns = data.get("backward_comm_time", 0)
    hidden_ns = data.get("backward_compute_comm_overlap_time", 0)
    return CommunicationTimes(data.get("iteration", 0), total_ns / 1e9, hidden_ns / 1e9)


def keep_process_group(wrapped: DistributedDataParallel) -> None:
    """Keep the process group alive until the C++ objects of DDP are destroyed.

    Fallback: DDP may destroy it.

    Their destructors hold the GIL. When they drop the last reference to a gloo group, its
    destructor joins a thread that may itself wait for the GIL, to free a tensor: a deadlock. A
    reference from Python is dropped without the GIL.
    """
    for name in ("reducer", "logger"):
        if hasattr(wrapped, name):
            weakref.finalize(getattr(wrapped, name), id, wrapped.process_group)


def clone_store(store: S) -> S:
    """Open another connection to a store, for another thread.

    Fallback: the same connection, which is locked.
    """
    return store.clone() if hasattr(store, "clone") else store


# Profiles.


@contextlib.contextmanager
def without_profiler_marks() -> Iterator[None]:
    """Drop the lines `USDT:...` that Kineto writes to standard error around a profile.

    Also its error that there is no GPU, of a torch build for CUDA on a machine without one.

    KINETO_LOG_LEVEL cannot do that: these lines have a higher level than errors. So file descriptor
    2 is a file in memory within this context, and all other lines are written when it ends.
    Fallback: all lines are.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.memfd_create("stderr"), "w+b") as lines:
        os.dup2(lines.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            lines.seek(0)
            kept = b"".join(line for line in lines if not PROFILER_MARK.search(line))
            with contextlib.suppress(OSError):  # the reader of a pipe exited
                os.write(2, kept)


# Memory of GPUs.


def record_gpu_allocations() -> None:
    """Let a dump name the line of code that allocated each block.

    Fallback: it does not. Without a GPU, do nothing.
    """
    if torch.cuda.is_initialized():
        getattr(torch.cuda.memory, "_record_memory_history", dict)(enabled="state", stacks="python")


def dump_gpu_memory(path: str) -> bool:
    """Write all blocks of GPU memory, a pickle that nothing here reads; return whether.

    Fallback: False, as without a GPU.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None or not torch.cuda.is_initialized():
        return False
    dump(path)
    return True


# torch.compile.


def cut_graph_at_buckets(wrapped: DistributedDataParallel, wanted: bool) -> None:
    """Let the compiler split the graph at DDP's buckets.

    So communication overlaps with the backward pass. It cannot if the first bucket is larger than
    the others. Fallback: the compiler's default.
    """
    from torch._dynamo import config

    if hasattr(config, "optimize_ddp"):
        bucket = getattr(wrapped, "bucket_bytes_cap", FIRST_BUCKET)
        config.optimize_ddp = wanted and bucket >= FIRST_BUCKET


def compile_deterministically(wanted: bool) -> None:
    """Disable autotuning between kernels whose summation order differs.

    On a GPU Inductor benchmarks padded matrix products, such as those for 65 characters, and may
    choose another kernel once its cache is lost. `torch.use_deterministic_algorithms` prevents only
    part of that. Fallback: its default.
    """
    from torch._inductor import config

    if hasattr(config, "deterministic"):
        config.deterministic = wanted


def compile_error() -> type[Exception]:
    """Return the class that torch.compile raises for a model it cannot compile.

    Fallback: RuntimeError.
    """
    from torch._dynamo import exc

    return getattr(exc, "TorchDynamoException", RuntimeError)
