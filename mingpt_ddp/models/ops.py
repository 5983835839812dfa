"""Tensor operations with a fast implementation for each device, and the choice of the device.

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
# Number of queries in a block of attention on a CPU. Keys after the last query are skipped.
QUERY_BLOCK = 64


def resolve_device(wanted: str, key: str) -> torch.device:
    """Return the device for a setting. `auto` chooses the GPU if there is one.

    Args:
        wanted: auto, cpu or cuda.
        key: Configuration key of the setting, for messages.

    Raises:
        ConfigError: The setting is cuda, and there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError(f"{key}=cuda, but torch sees no GPU here; use {key}=cpu")
    if wanted == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda")


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16. `auto` chooses bf16 if the device is fast at it, else fp32."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = torch_internals.cpu_is_fast_at_bf16()
    return "bf16" if is_fast else "fp32"


def is_on_cpu(x: Tensor) -> bool:
    """Return True if x is in the memory of a CPU."""
    return x.device.type == "cpu"


def has_own_backward(x: Tensor) -> bool:
    """Return True if operations on x use the backward passes of this file instead of torch's.

    They are faster on CPUs, and matter only while gradients are recorded. An export uses torch's,
    because torch 2.9 cannot export an autograd.Function for inputs of any length.
    """
    return is_on_cpu(x) and torch.is_grad_enabled() and not torch.compiler.is_exporting()


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of products with a parameter: its own, unless autocast sets another one."""
    device = parameter.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return parameter.dtype


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Attend causally. The last query is at the position of the last key.

    This is one fused kernel, except in bf16 on a CPU, where the backward pass of that kernel is
    slow. There, matrix products process blocks of queries. They skip most scores above the
    diagonal, which saves about a third of the work.

    Args:
        q: Queries, (B, H, T, D).
        k: Keys, (B, H, S, D).
        v: Values, (B, H, S, D).
        dropout: Probability of dropping an attention weight.
        bias: Added to the scores q k / sqrt(D), (H or 1, T, S).

    Returns:
        (B, H, T, D)
    """
    if is_on_cpu(q) and q.dtype == torch.bfloat16:
        return _blockwise_attention(q, k, v, dropout, bias)
    T = q.shape[2]
    S = k.shape[2]
    # Test this case first, and pass is_causal=True instead of a comparison of T: in torch.export T
    # is symbolic, but is_causal must be a plain bool.
    if bias is None and T == S:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    if bias is None and T == 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(diagonal=S - T)
    if bias is not None:
        mask = masked_bias(bias, mask, q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def masked_bias(bias: Tensor, is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Set a bias of scores (H or 1, T, S) to -inf for the keys that a query must not see."""
    return bias.masked_fill(~is_visible, -torch.inf).to(dtype)


def _blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: Tensor | None
) -> Tensor:
    """Attend with a pair of matrix products for each block of queries and the keys that it sees."""
    B, H, T, D = q.shape
    n_cached = k.shape[2] - T  # number of keys before the first query
    q = q.reshape(B * H, T, D)
    k = k.reshape(B * H, -1, D)
    v = v.reshape(B * H, -1, D)
    scale = 1 / math.sqrt(D)
    outputs = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        S = n_cached + stop
        mask = torch.full((stop - start, S), -torch.inf, dtype=q.dtype)
        mask = mask.triu(diagonal=n_cached + start + 1)  # 0 up to each query's own position
        if bias is not None:
            mask = (mask + bias[:, start:stop, :S]).to(q.dtype).expand(B, H, -1, -1).flatten(0, 1)
        queries = q[:, start:stop]
        keys = k[:, :S].transpose(1, 2)
        scores = torch.baddbmm(mask, queries, keys, alpha=scale)  # (BH, stop - start, S)
        weights = scores.softmax(dim=-1)
        weights = F.dropout(weights, dropout, dropout > 0)
        outputs.append(torch.bmm(weights, v[:, :S]))
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return y.view(B, H, T, D)


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension, in the precision of x.

    There is no gain. Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
    (arXiv:1910.07467).
    """
    if not is_on_cpu(x):
        return F.rms_norm(x, (x.shape[-1],)).to(x.dtype)  # CUDA's autocast returns fp32
    if has_own_backward(x):
        return _RMSNorm.apply(x)
    return x * _inverse_rms(x)


def _inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / (root mean square) of each vector of x (..., D), as (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.clamp_min(1e-6).reciprocal()
    return (inverse * math.sqrt(x.shape[-1])).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with few temporary tensors.

    On a CPU, torch computes F.rms_norm in several operations, whose temporaries are as large as x.
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
        return _rms_norm_backward(grad, y, scale)


def _rms_norm_backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of x from the gradient of y = x * scale, where scale is 1 / RMS(x)."""
    projection = (grad * y).mean(dim=-1, keepdim=True)
    return torch.addcmul(grad, y, projection, value=-1).mul_(scale)


def norm_and_shift(x: Tensor, share: Tensor) -> Tensor:
    """Normalize x, then add a share of the previous position's vector to each vector.

    The result is y_t + share * y_(t-1) with y = rms_norm(x), and with 0 before the first position.

    Args:
        x: Vectors of all positions, (B, T, C).
        share: The fraction of each channel, (C,).
    """
    if has_own_backward(x):
        return _NormAndShift.apply(x, share)
    y = rms_norm(x)
    # Do not pad y[:, :-1] instead: torch.export would then refuse inputs of two positions.
    previous = F.pad(y, (0, 0, 1, -1))
    return torch.addcmul(y, previous, share.to(y.dtype))


class _NormAndShift(torch.autograd.Function):
    """`norm_and_shift` with half as many passes over memory as autograd would need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor) -> Tensor:
        share = share.to(x.dtype)
        scale = _inverse_rms(x)
        y = x * scale
        z = y.clone()
        z[:, 1:].addcmul_(y[:, :-1], share)
        ctx.save_for_backward(y, scale, share)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, scale, share = ctx.saved_tensors
        grad_share = (grad[:, 1:] * y[:, :-1]).sum(dim=(0, 1))
        grad_y = grad.clone()
        grad_y[:, :-1].addcmul_(grad[:, 1:], share)
        return _rms_norm_backward(grad_y, y, scale), grad_share


def norm_and_rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Normalize x, then rotate each pair of elements (i, i + D / 2) by the angle of its position.

    Args:
        x: Queries and keys, (B, T, 2, H, D).
        rotary: Cosine and sine of the angles, (T, 2, 1, 1, D). The sines in the first half of D are
            negated.
    """
    if has_own_backward(x):
        return _NormAndRotate.apply(x, rotary)
    return _rotate(rms_norm(x), rotary)


class _NormAndRotate(torch.autograd.Function):
    """`norm_and_rotate` with two thirds of the passes over memory that autograd would need.

    A rotation does not change the norm of a vector. Therefore the backward pass of the norm can use
    the rotated vectors, and the vectors before the rotation need not be kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Tensor) -> Tensor:
        scale = _inverse_rms(x)
        y = _rotate(x * scale, rotary)
        ctx.save_for_backward(y, scale, rotary)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale, rotary = ctx.saved_tensors
        grad = _rms_norm_backward(grad, y, scale)
        return _rotate(grad, rotary, direction=-1), None


def _rotate(x: Tensor, rotary: Tensor, direction: int = 1) -> Tensor:
    """Rotate each pair of elements of x by its angle. With direction=-1, rotate it back."""
    cos, sin = rotary.unbind(1)  # each (T, 1, 1, D)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin, value=direction)


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V) for targets (B, T), computed in fp32."""
    logits = logits.flatten(0, 1).float()  # (BT, V)
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Apply dropout in training. Return x itself if the probability is 0, or in evaluation."""
    if training and probability > 0:
        return F.dropout(x, probability)
    return x


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2. Source: So et al. 2021, "Primer" (arXiv:2109.08668)."""
    if has_own_backward(x):
        return _ReLUSquared.apply(x)
    y = F.relu(x)
    return y * y  # not y ** 2, which CUDA's autocast would compute in fp32


class _ReLUSquared(torch.autograd.Function):
    """relu(x)^2 in two operations forward and two backward, where autograd would record five."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.relu()
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad * x).mul_(2)
