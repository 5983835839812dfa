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

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import SupportsCUDAGraphDecode, SupportsKVCache
from mingpt_ddp.models import ops as arithmetic
from mingpt_ddp.models.ops import DTYPES
from mingpt_ddp.torch_internals import can_pack, has_hooks, pack_linear, pack_linear_fp16

FEW = 8  # texts; with as many bf16 is faster than fp16 on a CPU
WARM_UP = 3  # steps before one is recorded, in which libraries allocate what they need


def choose_precision(wanted: str, model: nn.Module, batch: int) -> str:
    """What `precision=auto` stands for: 16 bits where the hardware is fast at it and the model is a `SupportsKVCache`."""
    if wanted != "auto":
        return wanted
    if not isinstance(model, SupportsKVCache):
        return "fp32"
    device = next(model.parameters()).device
    fast = arithmetic.choose_precision("auto", device)
    if device.type == "cuda":
        return fast
    packs = can_pack(DTYPES[fast])
    if can_pack(torch.float16) and (batch < FEW or fast == "fp32" or not packs):
        return "fp16"
    return fast if packs else "fp32"


def prepare(model: nn.Module, precision: str, batch: int) -> None:
    """Change a model in place, for sampling only: it cannot be trained or saved afterwards.

    Args:
        precision: fp32, bf16 or fp16. On a GPU that is the precision of everything, on a CPU that of the matrices.
        batch: sequences at a time, for which the matrices are laid out; others are right too.

    Raises:
        ConfigError: this torch cannot do it on this CPU.
    """
    dtype = DTYPES[precision]
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu or (precision == "bf16" and not can_pack(dtype)):
        model.to(dtype)
    elif precision == "fp16" and not can_pack(dtype):
        raise ConfigError("precision=fp16 needs FBGEMM on a CPU, which this torch does not have; use precision=auto")
    elif can_pack(dtype):
        packed = HalfLinear if precision == "fp16" else partial(PackedLinear, dtype=dtype, batch=batch)
        _replace(model, {nn.LayerNorm: PlainNorm, nn.Linear: packed})


def _replace(module: nn.Module, makers: dict[type[nn.Module], Any]) -> None:
    """In place of every layer that computes as one of these types does, another, which is called as a function is:
    a call of a module looks for hooks and finds its parts by name, which for a step costs as much as some layers."""
    for name, child in module.named_children():
        for kind, make in makers.items():
            if isinstance(child, kind) and type(child).forward is kind.forward and not has_hooks(child):
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
        self.packed = pack_linear_fp16(linear.weight.detach(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)

    __call__ = forward


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its matrix in oneDNN's own order, which is what it computes with."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, batch: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.dtype = dtype
        bias = linear.bias.detach().to(dtype) if linear.bias is not None else None
        self.packed = pack_linear(linear.weight.detach().to(dtype), bias, batch)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x.to(self.dtype)).to(x.dtype)

    __call__ = forward


class CUDAGraphDecodeStep:
    """A step of a model on a GPU, launched whole."""

    def __init__(self, model: SupportsCUDAGraphDecode, cache: Any, batch: int, device: torch.device) -> None:
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
