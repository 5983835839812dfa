"""Prepare a model for fast decoding: packed 16-bit weights on a CPU, a CUDA graph on a GPU.

On a CPU, decoding with a small model is bound by weight bandwidth: 16-bit copies halve the bytes,
and packed in the layout of the kernel they need no conversion. Everything else stays in fp32, in
which attention is faster too. For small batches FBGEMM's fp16 is fastest (fp32 in and out, faster
to start), for large ones oneDNN's bf16.

On a GPU a step is bound by kernel launches, which a CUDA graph reduces to one. torch.compile would
fuse some kernels, but compiling takes longer than thousands of tokens.

Shapes: B sequences, V = vocab_size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import SupportsCUDAGraphDecode, has_cache
from mingpt_ddp.models.ops import DTYPES, resolve_precision
from mingpt_ddp.torch_internals import can_pack, has_hooks, pack_linear

BF16_MIN_BATCH = 8  # sequences; from this batch on bf16 is faster than fp16 on a CPU
WARMUP_STEPS = 3  # before capture, so that libraries allocate their workspaces


def decoding_precision(wanted: str, model: nn.Module, batch: int) -> str:
    """Return fp32, bf16 or fp16.

    auto is 16 bits if the hardware is fast at it and the model has a KV cache.
    """
    if wanted != "auto":
        return wanted
    device = next(model.parameters()).device
    if not has_cache(model):
        return "fp32"
    fast = resolve_precision("auto", device)
    if device.type == "cuda":
        return fast
    packs_bf16 = fast == "bf16" and can_pack(torch.bfloat16)
    if can_pack(torch.float16) and (batch < BF16_MIN_BATCH or not packs_bf16):
        return "fp16"
    return "bf16" if packs_bf16 else "fp32"


def prepare(model: nn.Module, precision: str, batch: int) -> None:
    """Convert a model in place for sampling; afterwards it can be neither trained nor saved.

    Args:
        precision: fp32, bf16 or fp16: of the whole model on a GPU, of the weights of linear layers
            on a CPU.
        batch: batch size to pack the weights for; other sizes work too.

    Raises:
        ConfigError: this build of torch lacks the kernel for this CPU.
    """
    model.requires_grad_(False)
    dtype = DTYPES[precision]
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu or (precision == "bf16" and not can_pack(dtype)):
        model.to(dtype)
    elif precision == "fp16" and not can_pack(dtype):
        raise ConfigError(
            "precision=fp16 needs FBGEMM on a CPU, which this torch does not have; use "
            "precision=auto"
        )
    elif can_pack(dtype):
        _replace_layers(model, dtype, batch)


def _replace_layers(module: nn.Module, dtype: torch.dtype, batch: int) -> None:
    """Replace linear layers and layer norms, except those with hooks or an overridden forward."""
    for name, child in module.named_children():
        fast = FAST_LAYERS.get(type(child).forward)
        if fast is None or has_hooks(child):
            _replace_layers(child, dtype, batch)
            continue
        child.__class__ = fast
        assert isinstance(child, (FastLinear, FastLayerNorm))
        child.pack(dtype, batch)
        vars(module)[name] = child  # found without nn.Module.__getattr__, which is slow


# `__call__ = forward` skips nn.Module's hook dispatch, which costs as much per token as some
# layers.


class FastLinear(nn.Linear):
    """A linear layer with a packed copy of its weight; input and output types are unchanged."""

    def pack(self, dtype: torch.dtype, batch: int) -> None:
        self.multiply = pack_linear(self.weight, self.bias, dtype, batch)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    __call__ = forward


class FastLayerNorm(nn.LayerNorm):
    """A layer norm that calls torch.layer_norm directly."""

    def pack(self, dtype: torch.dtype, batch: int) -> None:
        self.arguments = (self.normalized_shape, self.weight, self.bias, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, *self.arguments)

    __call__ = forward


FAST_LAYERS: dict[Any, type[nn.Module]] = {
    nn.Linear.forward: FastLinear,
    nn.LayerNorm.forward: FastLayerNorm,
}


class CUDAGraphDecodeStep:
    """`model.step` captured in a CUDA graph: one launch per token."""

    def __init__(
        self, model: SupportsCUDAGraphDecode, cache: Any, batch: int, device: torch.device
    ) -> None:
        """Warm up and capture; this overwrites the first position of the cache."""
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                model.step(self.tokens, cache, self.position)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # Another thread may stage a snapshot.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = model.step(self.tokens, cache, self.position)

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Return the logits (B, V) after the new tokens (B,), valid until the next call."""
        self.tokens.copy_(tokens)
        self.position.fill_(position)
        self.graph.replay()
        return self.logits
