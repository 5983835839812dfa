"""Batch normalization whose statistics span all ranks: torch's on a GPU, and on a CPU, which
torch's refuses.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Let the batch normalizations of a model compute their statistics over all ranks.

    Return the model.

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
    # a single rank computes alike, so that the numbers do not depend on how many there are
    if dist.is_initialized():
        dist.all_reduce(values := values.clone())
    return values


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks. The loss of each rank depends on the sum, so the gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _sum_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum_over_ranks(grad)


def _forward(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalize each of C channels by the mean and the variance of the batches of all ranks, in
    fp32.

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
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    values = x.float()
    count = values.new_full((1,), values.numel() / values.shape[1])
    total, n = _AllReduceSum.apply(torch.cat([values.sum(dims), count])).split(
        [norm.num_features, 1]
    )
    mean = total / n
    centered = values - mean.view(shape)
    variance = _AllReduceSum.apply((centered * centered).sum(dims)) / n
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
            weight = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean, weight)
            norm.running_var.lerp_(variance * n / (n - 1).clamp_min(1), weight)
    return y.to(x.dtype)
