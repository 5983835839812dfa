"""Operations with a faster implementation per device, and the choice of device and precision.

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
    if wanted == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda")


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16; auto is bf16 where the device is fast at it."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = torch_internals.cpu_is_fast_at_bf16()
    return "bf16" if is_fast else "fp32"


def is_on_cpu(x: Tensor) -> bool:
    """Return whether a CPU computes with x."""
    return x.device.type == "cpu"


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of products with this parameter: autocast's, else its own."""
    device = parameter.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return parameter.dtype


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Attend causally; the last query is at the position of the last key.

    One fused kernel, except in bf16 on a CPU, where its backward pass is slow: there matrix
    products process blocks of queries and skip the third of the work that is above the diagonal.

    Args:
        q: (B, H, T, D). k, v: (B, H, S, D).
        dropout: probability of dropping an attention weight.
        bias: (H or 1, T, S) added to the scores, which are products over sqrt(D).

    Returns:
        (B, H, T, D)
    """
    if is_on_cpu(q) and q.dtype == torch.bfloat16:
        return _blockwise_attention(q, k, v, dropout, bias)
    T = q.shape[2]
    S = k.shape[2]
    # first: in a torch.export T is symbolic, and is_causal must be a plain bool
    if bias is None and T == S:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    if bias is None and T == 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(diagonal=S - T)
    if bias is not None:
        mask = masked_bias(bias, mask, q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def masked_bias(bias: Tensor, is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores: a bias (H or 1, T, S), -inf where a key is not visible."""
    return bias.masked_fill(~is_visible, -torch.inf).to(dtype)


def _blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: Tensor | None
) -> Tensor:
    """Attend with one pair of matrix products per block of queries, up to its last key."""
    B, H, T, D = q.shape
    cached = k.shape[2] - T  # keys before the first query
    q = q.reshape(B * H, T, D)
    k = k.reshape(B * H, -1, D)
    v = v.reshape(B * H, -1, D)
    scale = 1 / math.sqrt(D)
    outputs = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        S = cached + stop
        mask = torch.full((stop - start, S), -torch.inf, dtype=q.dtype)
        mask = mask.triu(diagonal=cached + start + 1)  # 0 up to each query's own position
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

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467),
    without gain.
    """
    if not is_on_cpu(x):
        return F.rms_norm(x, (x.shape[-1],)).to(x.dtype)  # CUDA's autocast returns fp32
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x)
    return x * _inverse_rms(x)


def _inverse_rms(x: Tensor) -> Tensor:
    """Return sqrt(D) / norm of each vector of x (..., D), as (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.clamp_min_(1e-6).reciprocal_()
    return inverse.mul_(math.sqrt(x.shape[-1])).to(x.dtype)


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
        return _rms_norm_backward(grad, y, scale)


def _rms_norm_backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of x, for y = x * scale."""
    projection = (grad * y).mean(dim=-1, keepdim=True)
    return torch.addcmul(grad, y, projection, value=-1).mul_(scale)


def norm_and_shift(x: Tensor, share: Tensor) -> Tensor:
    """Return y_t + share * y_(t-1) with y = rms_norm(x), where y before the first position is 0.

    Args:
        x: (B, T, C).
        share: (C,).
    """
    if is_on_cpu(x) and torch.is_grad_enabled() and not torch.compiler.is_exporting():
        return _NormAndShift.apply(x, share)
    y = rms_norm(x)
    # not of y[:, :-1]: torch.export would forbid the length whose slice has one position
    previous = F.pad(y, (0, 0, 1, -1))
    return torch.addcmul(y, previous, share.to(y.dtype))


class _NormAndShift(torch.autograd.Function):
    """`norm_and_shift` in half of the passes over memory."""

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
    """Return `rms_norm` of x, each pair of elements (i, i + D / 2) rotated by its position's angle.

    Args:
        x: (B, T, 2, H, D).
        rotary: (T, 2, 1, 1, D) the cosine and the sine of the angles; the sine of the first half
            is negative.
    """
    if is_on_cpu(x) and torch.is_grad_enabled():
        return _NormAndRotate.apply(x, rotary)
    return _rotate(rms_norm(x), rotary)


class _NormAndRotate(torch.autograd.Function):
    """`norm_and_rotate` in two thirds of the passes over memory.

    A rotation keeps the norm, so that the backward pass of the norm needs its result alone.
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
    """Rotate as `norm_and_rotate` does; back if the direction is -1."""
    cos, sin = rotary.unbind(1)  # each (T, 1, 1, D)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin, value=direction)


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy, in fp32, of logits (B, T, V) and targets (B, T)."""
    logits = logits.flatten(0, 1).float()  # (BT, V)
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Apply F.dropout; return x itself, without a call, if it is a no-op."""
    if training and probability > 0:
        return F.dropout(x, probability)
    return x


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2. Source: So et al. 2021, "Primer" (arXiv:2109.08668)."""
    if is_on_cpu(x) and torch.is_grad_enabled():
        return _ReLUSquared.apply(x)
    y = F.relu(x)
    return y * y  # a power, CUDA's autocast would compute in fp32


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
