"""Functions of torch as CUDA computes them, on tensors without data of a CPU.

A GPU's autocast computes more of them in fp32; attention, dropout and RMS norm are one kernel each,
which keeps less for the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mingpt_ddp.torch_internals import attend_in_one_kernel

# Source: torch's documentation of automatic mixed precision, "CUDA Ops that can autocast to
# float32"; those that a CPU computes in the type of their input.
FP32_FUNCTIONS = {
    *("exp", "log", "pow", "prod", "reciprocal", "rsqrt", "sum", "cumsum", "cumprod", "norm"),
    *("layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "softplus", "normalize"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
}


class CUDAFunctions(TorchFunctionMode):
    """Let functions of torch keep and compute on a CPU what they do on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "is_on_cpu":  # of models/ops.py
            return False
        if name == "scaled_dot_product_attention":
            return _attend(*args, **kwargs)
        if name == "dropout":
            return _drop(*args, **kwargs)
        if name in FP32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_to_fp32, args))
            kwargs = {key: _to_fp32(value) for key, value in kwargs.items()}
        if name == "rms_norm":
            # its kernel keeps what that of layer_norm does: its input, and numbers per row
            return F.layer_norm(*args[:2])
        return func(*args, **kwargs)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (each.to(dtype) for each in (q, k, v))
    if attn_mask is not None or options:
        attend = F.scaled_dot_product_attention
        return attend(q, k, v, attn_mask, is_causal=is_causal, **options)
    return attend_in_one_kernel(q, k, v, is_causal)


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keep a mask of a byte per element, as CUDA's kernel; a CPU keeps its factors."""
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, training)[0]


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
