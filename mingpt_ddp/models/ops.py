"""Operations with a faster implementation per device: causal attention, RMSNorm, squared ReLU;
device and precision.

Shapes: B sequences, H heads, T queries, S >= T keys, D = head size.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt_ddp import torch_internals
from mingpt_ddp.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUERY_BLOCK = 64  # queries per block on a CPU; later keys are skipped


def resolve_device(wanted: str, key: str) -> torch.device:
    """Return the wanted device; auto is the GPU if there is one.

    Args:
        wanted: auto, cpu or cuda.
        key: the configuration key, for messages.

    Raises:
        ConfigError: there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError(f"{key}=cuda, but torch sees no GPU here; use {key}=cpu")
    return torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16; auto is bf16 where the device is fast at it."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch_internals.cpu_is_fast_at_bf16() else "fp32"


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of products with this parameter: that of autocast, else that of the
    parameter.
    """
    device = parameter.device.type
    return (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Attend causally; the last query is at the position of the last key.

    One fused kernel, except in bf16 on a CPU, where its backward pass is slow: there matrix
    products process blocks of queries and skip the third of the work that is above the diagonal.

    Args:
        q: (B, H, T, D). k, v: (B, H, S, D).
        dropout: probability of dropping an attention weight.

    Returns:
        (B, H, T, D)
    """
    T = q.shape[2]
    S = k.shape[2]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _blockwise_attention(q, k, v, dropout)
    if T == S or T == 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=T > 1)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(diagonal=S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def _blockwise_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    B, H, T, D = q.shape
    cached = k.shape[2] - T
    q = q.reshape(B * H, T, D)
    k = k.reshape(B * H, -1, D)
    v = v.reshape(B * H, -1, D)
    blocks = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        S = cached + stop
        mask = torch.full((stop - start, S), -torch.inf, dtype=q.dtype).triu(
            diagonal=cached + start + 1
        )
        scores = torch.baddbmm(
            mask, q[:, start:stop], k[:, :S].transpose(1, 2), alpha=1 / math.sqrt(D)
        )
        weights = F.dropout(scores.softmax(dim=-1), dropout, dropout > 0)
        blocks.append(torch.bmm(weights, v[:, :S]))
    y = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    return y.view(B, H, T, D)


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension, in the precision of x.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467),
    without gain.
    """
    if x.device.type == "cpu":
        return _RMSNorm.apply(x) if torch.is_grad_enabled() else x * _inverse_rms(x)
    return F.rms_norm(x, (x.shape[-1],)).to(x.dtype)  # CUDA's autocast returns fp32


def _inverse_rms(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.clamp_min_(1e-6).reciprocal_().mul_(math.sqrt(x.shape[-1])).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with few temporaries.

    On a CPU torch composes it from operations with temporaries as large as x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = _inverse_rms(x)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        projection = (grad * y).mean(dim=-1, keepdim=True)
        return torch.addcmul(grad, y, projection, value=-1).mul_(scale)


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy, in fp32, of logits (B, T, V) and targets (B, T)."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=label_smoothing
    )


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Apply F.dropout; return x itself, without a call, if it is a no-op."""
    return F.dropout(x, probability) if training and probability > 0 else x


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2. Source: So et al. 2021, "Primer" (arXiv:2109.08668)."""
    if x.device.type == "cpu" and torch.is_grad_enabled():
        return _ReLUSquared.apply(x)
    return (y := F.relu(x)) * y  # CUDA's autocast squares in fp32


class _ReLUSquared(torch.autograd.Function):
    """Two operations forward and two backward; autograd records five."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.relu()
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad * x).mul_(2)
