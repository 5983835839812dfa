"""A model made ready to write text fast: its matrices laid out for it on a CPU, its steps recorded on a GPU.

On a CPU a step of a small model is a walk through its weights. In 16 bits they are half as many bytes, and those that
lie in the kernel's own order need not be brought into it for every character. All else stays in fp32, where attention
is faster as well. For few texts at once fp16 by FBGEMM is fastest (it takes and gives fp32, and starts sooner), for
many bf16 by oneDNN.

On a GPU a step is a row of launches, of which a CUDA graph makes one. torch.compile would fuse some,
after a start that takes longer than thousands of characters.

Shapes: B sequences, V = vocab_size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp import arithmetic
from mingpt_ddp.arithmetic import DTYPES
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.model import Decoder, StepDecoder

FEW = 8  # texts; with as many bf16 is faster than fp16 on a CPU
WARM_UP = 3  # steps before one is recorded, in which libraries allocate what they need


def choose_precision(wanted: str, model: nn.Module, batch: int) -> str:
    """What `precision=auto` stands for: 16 bits where the hardware is fast at it and the model is a `Decoder`."""
    if wanted != "auto":
        return wanted
    if not isinstance(model, Decoder):
        return "fp32"
    device = next(model.parameters()).device
    fast = arithmetic.choose_precision("auto", device)
    if device.type == "cuda":
        return fast
    if _has_fbgemm() and (batch < FEW or fast == "fp32" or not _can_pack()):
        return "fp16"
    return fast if _can_pack() else "fp32"


def prepare(model: nn.Module, precision: str, batch: int) -> None:
    """Change a model in place, for sampling only: it cannot be trained or saved afterwards.

    Args:
        precision: fp32, bf16 or fp16. On a GPU that is the precision of everything, on a CPU that of the matrices.
        batch: sequences at a time, for which the matrices are laid out; others are right too.

    Raises:
        ConfigError: this torch cannot do it on this CPU.
    """
    if next(model.parameters()).device.type == "cuda":
        model.to(DTYPES[precision])
    elif precision == "fp16":
        if not _has_fbgemm():
            raise ConfigError(
                "precision=fp16 needs FBGEMM on a CPU, which this torch does not have; use precision=auto"
            )
        _replace(model, {nn.LayerNorm: PlainNorm, nn.Linear: HalfLinear})
    elif _can_pack():
        packed = partial(PackedLinear, dtype=DTYPES[precision], batch=batch)
        _replace(model, {nn.LayerNorm: PlainNorm, nn.Linear: packed})
    elif precision == "bf16":
        model.to(torch.bfloat16)


def _can_pack() -> bool:
    """oneDNN is there, with the two operations that torch's own compiler uses for frozen weights."""
    if not torch.backends.mkldnn.is_available():
        return False
    operations = torch.ops.mkldnn
    return hasattr(operations, "_reorder_linear_weight") and hasattr(operations, "_linear_pointwise")


def _has_fbgemm() -> bool:
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):  # the default is x86 where there is FBGEMM
        return False
    return hasattr(torch.ops.quantized, "linear_prepack_fp16") and hasattr(torch.ops.quantized, "linear_dynamic_fp16")


def _replace(module: nn.Module, makers: dict[type[nn.Module], Any]) -> None:
    """In place of every layer that computes as one of these types does, another, which is called as a function is:
    a call of a module looks for hooks and finds its parts by name, which for a step costs as much as some layers."""
    for name, child in module.named_children():
        for kind, make in makers.items():
            hooked = child._forward_hooks or child._forward_pre_hooks
            if isinstance(child, kind) and type(child).forward is kind.forward and not hooked:
                setattr(module, name, make(child))
                vars(module)[name] = getattr(module, name)  # found at once
                break
        else:
            _replace(child, makers)


class PlainNorm(nn.LayerNorm):
    """A layer norm of which only the operation is left."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(norm.normalized_shape, norm.eps, norm.elementwise_affine, norm.bias is not None, device="meta")
        self.weight, self.bias = norm.weight, norm.bias
        gain, shift = (None if p is None else p.detach() for p in (norm.weight, norm.bias))
        self.rest = (self.normalized_shape, gain, shift, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, *self.rest)

    __call__ = forward


class HalfLinear(nn.Linear):
    """A linear layer that computes with a copy of its matrix in fp16; what it multiplies and sums up is in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        bias = linear.bias.detach() if linear.bias is not None else None
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)
        self.operation = torch.ops.quantized.linear_dynamic_fp16.default

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.operation(x, self.packed)
        return y

    __call__ = forward


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its matrix in oneDNN's own order, which is what it computes with."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, batch: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.dtype = dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), batch)
        self.packed_bias = linear.bias.detach().to(dtype) if linear.bias is not None else None
        self.operation = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.operation(x.to(self.dtype), self.packed, self.packed_bias, "none", [], "")
        return y.to(x.dtype)

    __call__ = forward


class RecordedStep:
    """A step of a model on a GPU, launched whole."""

    def __init__(self, model: StepDecoder, cache: Any, batch: int, device: torch.device) -> None:
        """Record it. What the cache has at its first position is overwritten meanwhile."""
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                model.step(self.tokens, cache, self.position)
        torch.cuda.current_stream(device).wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads may copy a snapshot
            self.logits = model.step(self.tokens, cache, self.position)

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Logits (B, V) behind the new tokens (B,), valid until the next call."""
        self.tokens.copy_(tokens)
        self.position.fill_(position)
        self.graph.replay()
        return self.logits
