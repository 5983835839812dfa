"""Batch normalization over all ranks: torch's on a GPU, our own on a CPU, which torch's refuses."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Let batch normalizations compute their statistics over all ranks; return the model.

    Parameters, buffers and their names stay.
    """
    if device.type == "cuda":
        synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return synchronized
    norms: list[Any] = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    for norm in norms:
        norm.forward = partial(_forward, norm)
    return model


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum; a single rank's own values, so that world sizes compute alike."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks. The loss of each rank depends on the sum, so the gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _sum_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum_over_ranks(grad)


def _forward(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalize each of C channels by mean and variance over all ranks, in fp32.

    Args:
        x: (B, C, ...)

    Returns:
        (B, C, ...), in the type of x.

    Source: Ioffe and Szegedy 2015, "Batch Normalization" (arXiv:1502.03167).
    """
    if not norm.training:
        by_batch = norm.running_mean is None
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, by_batch, eps=norm.eps
        )
    dims = [0, *range(2, x.dim())]  # all but the channels
    shape = [1, -1, *[1] * (x.dim() - 2)]  # of a value per channel, to broadcast
    values = x.float()

    count = values.new_full((1,), values.numel() / values.shape[1])
    sums_and_count = torch.cat([values.sum(dims), count])  # (C + 1)
    total, n = _AllReduceSum.apply(sums_and_count).split([norm.num_features, 1])
    mean = total / n  # (C)
    centered = values - mean.view(shape)
    squares = (centered * centered).sum(dims)
    variance = _AllReduceSum.apply(squares) / n  # (C)

    y = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        y = torch.addcmul(norm.bias.view(shape), y, norm.weight.view(shape))
    if (
        norm.running_mean is not None
        and norm.running_var is not None
        and norm.num_batches_tracked is not None
    ):
        with torch.no_grad():
            norm.num_batches_tracked += 1
            weight = norm.momentum
            if weight is None:  # the mean of all batches
                weight = 1 / float(norm.num_batches_tracked)
            norm.running_mean.lerp_(mean, weight)
            norm.running_var.lerp_(variance * n / (n - 1).clamp_min(1), weight)
    return y.to(x.dtype)
