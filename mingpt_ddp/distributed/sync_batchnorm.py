"""Batch normalization whose statistics span all ranks, on a CPU too; torch's own needs a GPU."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks. Each rank's loss depends on the sum, so the gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm(_BatchNorm):
    """Normalize each of C channels by the mean and variance of the batches of all ranks.

    Source: Ioffe and Szegedy 2015, "Batch Normalization" (arXiv:1502.03167).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x (B, C, ...), in its type; statistics are computed in fp32."""
        if not self.training:
            return super().forward(x)
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        values = x.float()
        count = values.new_full((1,), values.numel() / values.shape[1])
        total, n = _AllReduceSum.apply(torch.cat([values.sum(dims), count])).split([self.num_features, 1])
        centered = values - (total / n).view(shape)
        variance = _AllReduceSum.apply((centered * centered).sum(dims)) / n
        y = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = torch.addcmul(self.bias.view(shape), y, self.weight.view(shape))
        self._update_running_statistics((total / n).detach(), (variance * n / (n - 1).clamp_min(1)).detach())
        return y.to(x.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions; `_BatchNorm.forward` asks."""


def synchronize(module: nn.Module) -> nn.Module:
    """Replace the batch normalizations in a module; return it, or what replaces it. Parameters and buffers stay."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        new = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        new.weight, new.bias = module.weight, module.bias
        new.running_mean, new.running_var = module.running_mean, module.running_var
        new.num_batches_tracked = module.num_batches_tracked
        return new.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, synchronize(child))
    return module
