"""The only module that touches what torch does not promise: private functions, and attributes that no document names.

Each function says what it is for, and has a fallback for a torch that lacks it. tests/unit/test_torch_internals.py
names every one of them, so that an upgrade of torch breaks that test and not a run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

S = TypeVar("S")
FIRST_BUCKET = 1 << 20  # bytes of gradients that DDP reduces first, whatever the size of the other buckets


# Arithmetic.


def cpu_is_fast_at_bf16() -> bool:
    """Whether the CPU multiplies matrices in bf16 by its own instructions. Fallback: no."""
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, question, bool)() for question in questions)


def for_each(operation: str, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
    """Call a method of tensors, such as `mul_`, for all of a list in few kernels: torch._foreach_mul_.

    Args:
        arguments: of the method; a list or tuple has one for each tensor.

    Fallback: one call after another.
    """
    fused = getattr(torch, f"_foreach_{operation}", None)
    if fused is not None:
        return fused(tensors, *arguments, **options)
    rows = [[a[i] if isinstance(a, (list, tuple)) else a for a in arguments] for i in range(len(tensors))]
    return tuple(getattr(t, operation)(*row, **options) for t, row in zip(tensors, rows, strict=True))


def leave_overflow_to_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Have GradScaler skip a step with an overflow, not the fused kernel by itself. Fallback: that is so already."""
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


# Inference on a CPU.


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward of the module calls hooks. Fallback: yes, so that nobody replaces the module."""
    return any(getattr(module, hooks, True) for hooks in ("_forward_hooks", "_forward_pre_hooks"))


def pack_linear(weight: Tensor, bias: Tensor | None, batch: int) -> Callable[[Tensor], Tensor]:
    """A linear layer by oneDNN with a copy of its weight in the order of the kernel, as Inductor has frozen weights.

    Args:
        weight: (outputs, inputs) and bias: (outputs,), both of the type to compute in.
        batch: rows of the input for which the order is best; others are right too.

    Returns:
        From (..., inputs) to (..., outputs), both of that type.

    Raises:
        AttributeError, RuntimeError: not with this torch or this CPU; ask `can_pack` first.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, batch)
    operation = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: operation(x, packed, bias, "none", [], "")


def pack_linear_fp16(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A linear layer by FBGEMM with a copy of its weight in fp16; all else is in fp32.

    Raises:
        AttributeError, RuntimeError: not with this torch or this CPU; ask `can_pack` first.
    """
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    operation = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: operation(x, packed)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether `pack_linear`, or `pack_linear_fp16` for fp16, works here, found by trying a tiny layer once.

    oneDNN has bf16 only on CPUs with AVX-512 or its successors. Fallback: no.
    """
    half = dtype == torch.float16
    weight = torch.ones(2, 2, dtype=torch.float32 if half else dtype)
    try:
        if half and torch.backends.quantized.engine not in ("x86", "fbgemm"):  # another engine packs otherwise
            return False
        layer = pack_linear_fp16(weight, None) if half else pack_linear(weight, None, 1)
        return layer(weight).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    except (AttributeError, RuntimeError):
        return False


# Training on several ranks.


def time_communication(wrapped: DistributedDataParallel, every: int) -> None:
    """Have DDP time its communication in one backward pass of so many. Fallback: it never does."""
    set_rate = getattr(wrapped, "_set_ddp_runtime_logging_sample_rate", None)
    if set_rate is not None:
        set_rate(every)


def communication_times(wrapped: DistributedDataParallel) -> tuple[float, float]:
    """Seconds of the latest timed backward: reducing gradients, and the part hidden behind it. Fallback: 0, 0."""
    data: dict[str, float] = getattr(wrapped, "_get_ddp_logging_data", dict)()
    names = ("backward_comm_time", "backward_compute_comm_overlap_time")
    total, hidden = (data.get(name, 0) / 1e9 for name in names)  # nanoseconds
    return total, hidden


def keep_process_group(wrapped: DistributedDataParallel) -> None:
    """Keep the process group alive until the C++ objects of DDP are destroyed. Fallback: it may die with them.

    Their destructors hold the GIL. When they drop the last reference to a gloo group, its destructor joins a thread
    that may itself wait for the GIL, to free a tensor: a deadlock. A reference from Python is dropped without the GIL.
    """
    for name in ("reducer", "logger"):
        if hasattr(wrapped, name):
            weakref.finalize(getattr(wrapped, name), id, wrapped.process_group)


def clone_store(store: S) -> S:
    """A connection of its own to the job's store, for another thread. Fallback: the same connection, which locks."""
    return store.clone() if hasattr(store, "clone") else store


# torch.compile.


def cut_graph_at_buckets(wrapped: DistributedDataParallel, wanted: bool) -> None:
    """Let the compiler cut the graph where a bucket is full, so that communication overlaps with the backward pass.

    It cannot where the first bucket is larger than the others. Fallback: the compiler's default.
    """
    from torch._dynamo import config

    if hasattr(config, "optimize_ddp"):
        config.optimize_ddp = wanted and getattr(wrapped, "bucket_bytes_cap", FIRST_BUCKET) >= FIRST_BUCKET


def compile_error() -> type[Exception]:
    """What torch.compile raises for a model that it cannot compile. Fallback: any RuntimeError."""
    from torch._dynamo import exc

    return getattr(exc, "TorchDynamoException", RuntimeError)
