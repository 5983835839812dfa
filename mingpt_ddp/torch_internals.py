"""The only module that uses torch internals: private functions and undocumented attributes.

Each function checks that this version of torch has the internals that it uses. If not, it does what
its docstring calls the fallback. tests/unit/test_torch_internals.py lists all internals, so that an
upgrade of torch breaks this test and not a run.
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
# Lines that the profiler writes to standard error, and that do not help a user.
PROFILER_NOISE = re.compile(rb"^USDT:|gpuGetDeviceCount failed")
# Size of DDP's first bucket of gradients. It does not depend on ddp.bucket_cap_mb.
FIRST_BUCKET_BYTES = 1 << 20


# Arithmetic.


def cpu_is_fast_at_bf16() -> bool:
    """Return True if the CPU has bf16 matrix instructions that oneDNN can use. Fallback: False."""
    instructions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_instructions = any(getattr(torch.cpu, check, bool)() for check in instructions)
    return has_instructions and getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()


def for_each(operation: str, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
    """Apply a method to a list of tensors in few kernels, as torch._foreach_mul_ does for `mul_`.

    Fallback: a loop over the tensors.

    Args:
        operation: Name of the method, such as `mul_`.
        arguments: Arguments of the method. A list or tuple has one argument for each tensor.
        options: Keyword arguments of the method.
    """
    fused = getattr(torch, f"_foreach_{operation}", None)
    if fused is not None:
        return fused(tensors, *arguments, **options)
    results = []
    for i, tensor in enumerate(tensors):
        tensor_arguments = [a[i] if isinstance(a, (list, tuple)) else a for a in arguments]
        results.append(getattr(tensor, operation)(*tensor_arguments, **options))
    return tuple(results)


def leave_overflow_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Let GradScaler, not the fused kernel, skip a step that overflowed.

    Fallback: do nothing, because GradScaler skips such steps without this setting.
    """
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


# Inference on a CPU.


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks.

    Fallback: True, so that the caller does not replace the module.
    """
    return any(getattr(module, hooks, True) for hooks in ("_forward_hooks", "_forward_pre_hooks"))


def pack_linear(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, batch: int
) -> Callable[[Tensor], Tensor]:
    """Return a linear layer whose weight is packed: stored in the layout that the kernel needs.

    Inductor packs weights in the same way.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,).
        dtype: Data type of the packed weight. fp16 uses a kernel of FBGEMM, with input and output
            in fp32. Other data types use a kernel of oneDNN.
        batch: Number of input rows to optimize for. The layer also works with other numbers.

    Returns:
        A function from (..., inputs) to (..., outputs) of the same data type.

    Raises:
        AttributeError, RuntimeError: This torch build or CPU lacks the kernel. Call `can_pack`
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
    """Call `pack_linear` for a tiny layer. Return True if it works on this machine.

    Fallback: False.

    oneDNN supports bf16 only on CPUs with AVX-512 or later.
    """
    weight = torch.ones(2, 2)
    try:
        if dtype == torch.float16 and torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return False  # other engines use other formats
        linear = pack_linear(weight, None, dtype, 1)
        return linear(weight).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    except (AttributeError, RuntimeError):
        return False


# Training on several ranks.


def time_communication(wrapped: DistributedDataParallel, every: int) -> None:
    """Make DDP time its communication in one of `every` backward passes. Fallback: no timing."""
    getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", id)(every)


@dataclass(frozen=True)
class CommunicationTimes:
    """The time of a reduction of gradients, as DDP has measured it, in seconds."""

    # Number of the backward pass. Only backward passes that reduce gradients count, from 1.
    iteration: int
    total_s: float
    hidden_s: float  # the part of total_s during which the backward pass computed


def communication_times(model: nn.Module) -> CommunicationTimes:
    """Return the times of the latest timed reduction of gradients.

    Fallback: zeros. A model without DDP also has zeros.
    """
    data: dict[str, int] = getattr(model, "_get_ddp_logging_data", dict)()
    total_ns = data.get("backward_comm_time", 0)
    hidden_ns = data.get("backward_compute_comm_overlap_time", 0)
    return CommunicationTimes(data.get("iteration", 0), total_ns / 1e9, hidden_ns / 1e9)


def keep_process_group(wrapped: DistributedDataParallel) -> None:
    """Keep the process group alive until the C++ objects of DDP are destroyed.

    The destructors of these objects hold the GIL. If they drop the last reference to a gloo group,
    the destructor of the group joins a thread. This thread may itself wait for the GIL, to free a
    tensor, which is a deadlock. This function therefore adds a reference from Python, which is
    dropped after these objects are destroyed. torch releases the GIL before it drops such a
    reference.

    Fallback: DDP may destroy the process group.
    """
    for name in ("reducer", "logger"):
        if hasattr(wrapped, name):
            weakref.finalize(getattr(wrapped, name), id, wrapped.process_group)


def clone_store(store: S) -> S:
    """Open another connection to a store, for another thread.

    Fallback: the same connection. Only one thread can use it at a time.
    """
    return store.clone() if hasattr(store, "clone") else store


# Profiles.


@contextlib.contextmanager
def without_profiler_noise() -> Iterator[None]:
    """Drop the lines `USDT:...`, which Kineto prints when a profile begins and when it ends.

    Also drop the error that there is no GPU, which a torch build for CUDA writes on a machine
    without a GPU.

    KINETO_LOG_LEVEL cannot drop these lines, because their level is higher than the level of
    errors. File descriptor 2 is therefore a file in memory within this context. All other lines are
    written to standard error when the context ends. Fallback: all lines are written.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # standard error is closed
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
            kept = b"".join(line for line in lines if not PROFILER_NOISE.search(line))
            with contextlib.suppress(OSError):  # standard error is a pipe whose reader has exited
                os.write(2, kept)


# Memory of GPUs.


def record_gpu_allocations() -> None:
    """Record the line of code that allocates each block of GPU memory, for `dump_gpu_memory`.

    Without a GPU, do nothing. Fallback: a dump does not name lines of code.
    """
    if torch.cuda.is_initialized():
        getattr(torch.cuda.memory, "_record_memory_history", dict)(enabled="state", stacks="python")


def dump_gpu_memory(path: str) -> bool:
    """Write a description of all blocks of GPU memory to a pickle file. Return True if written.

    This package never reads the file. Without a GPU, return False. Fallback: False.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None or not torch.cuda.is_initialized():
        return False
    dump(path)
    return True


# torch.compile.


def cut_graph_at_buckets(wrapped: DistributedDataParallel, wanted: bool) -> None:
    """Let the compiler split the graph at DDP's buckets, or forbid it.

    With a split graph, communication overlaps with the backward pass. The compiler cannot split the
    graph if the first bucket is larger than the others. Fallback: the compiler's default.
    """
    from torch._dynamo import config

    if hasattr(config, "optimize_ddp"):
        bucket = getattr(wrapped, "bucket_bytes_cap", FIRST_BUCKET_BYTES)
        config.optimize_ddp = wanted and bucket >= FIRST_BUCKET_BYTES


def compile_deterministically(wanted: bool) -> None:
    """Stop Inductor from choosing kernels by benchmarks.

    Different kernels add numbers in different orders, so their results differ in the last bits. On
    a GPU, Inductor benchmarks matrix products that it could pad, such as the output layer of a
    model with an odd vocabulary size. It may choose a different kernel after its cache is lost.
    `torch.use_deterministic_algorithms` prevents only some of these choices. Fallback: Inductor's
    default.
    """
    from torch._inductor import config

    if hasattr(config, "deterministic"):
        config.deterministic = wanted


def compile_error() -> type[Exception]:
    """Return the class of the error that torch.compile raises if it cannot compile a model.

    Fallback: RuntimeError.
    """
    from torch._dynamo import exc

    return getattr(exc, "TorchDynamoException", RuntimeError)
