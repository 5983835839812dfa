"""Prepare a model for fast decoding: packed 16-bit weights on a CPU, a CUDA graph on a GPU.

On a CPU, reading the weights takes most of the time if the model is small. 16-bit copies of the
weights halve the bytes to read. They are packed in the layout that the kernel reads, so that
no weight is converted again for each token. Everything else stays in fp32, in which attention is
faster too. For small batches, FBGEMM's fp16 kernel is fastest: its inputs and outputs are fp32, and
it starts quickly. For large batches, oneDNN's bf16 kernel is fastest.

On a GPU, launching kernels takes most of the time of a step, and a CUDA graph needs only one
launch. torch.compile would fuse some kernels, but compilation takes longer than generating
thousands of tokens.

Shapes: B sequences, V = vocab_size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import SupportsCUDAGraphDecode, has_cache
from mingpt_ddp.models.ops import DTYPES, resolve_precision
from mingpt_ddp.torch_internals import can_pack, has_hooks, pack_linear

BF16_MIN_BATCH = 8  # smallest batch size at which bf16 is faster than fp16 on a CPU
# Number of decoding steps to run before a CUDA graph is captured. In these steps, libraries
# allocate their workspaces.
WARMUP_STEPS = 3


def decoding_precision(wanted: str, model: nn.Module, batch: int) -> str:
    """Return the precision to decode in: fp32, bf16 or fp16.

    `auto` chooses 16 bits if the hardware computes fast in 16 bits and the model has a KV cache.

    Args:
        wanted: auto, fp32, bf16 or fp16.
        batch: Number of sequences to sample together.
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
    """Convert a model in place for fast sampling. Afterwards it cannot be trained or saved.

    Args:
        precision: fp32, bf16 or fp16. On a GPU, the whole model is converted. On a CPU, only the
            weights of linear layers are.
        batch: Batch size for which the weights are packed. Other batch sizes work too.

    Raises:
        ConfigError: precision=fp16 needs a kernel that this build of torch does not have.
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
    """Make linear layers and layer norms fast, unless they have hooks or an overridden forward."""
    for name, child in module.named_children():
        fast = FAST_LAYERS.get(type(child).forward)
        if fast is None or has_hooks(child):
            _replace_layers(child, dtype, batch)
            continue
        child.__class__ = fast
        assert isinstance(child, (FastLinear, FastLayerNorm))
        child.pack(dtype, batch)
        # A plain attribute is found without nn.Module.__getattr__, which is slow.
        vars(module)[name] = child


# In the classes below, `__call__ = forward` skips nn.Module's hook dispatch, which would take as
# long as some of the layers themselves.


class FastLinear(nn.Linear):
    """A linear layer that multiplies with a packed 16-bit copy of its weight.

    The types of its input and output do not change.
    """

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
    """A CUDA graph of `model.step`, which needs one launch per token."""

    def __init__(
        self, model: SupportsCUDAGraphDecode, cache: Any, batch: int, device: torch.device
    ) -> None:
        """Warm up and capture the graph. This overwrites the first position of the cache."""
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                model.step(self.tokens, cache, self.position)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # With "thread_local", another thread may copy a snapshot to the host during the capture.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = model.step(self.tokens, cache, self.position)

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Return the logits (B, V) after the new tokens (B,). The next call overwrites them."""
        self.tokens.copy_(tokens)
        self.position.fill_(position)
        self.graph.replay()
        return self.logits
