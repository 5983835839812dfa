"""Muon for the matrices of the hidden layers, AdamW for everything else, as one optimizer.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Amsel et al. 2025, "The Polar
Express" (arXiv:2505.16932).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mingpt_ddp.groups import MuonConfig

# Odd polynomials a x + b x^3 + c x^5, one for each step, which together send all of [0.01, 1] to about 1.
POLYNOMIALS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
)


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace the singular values of each matrix (N, rows, columns) by values near 1, computing in `dtype`."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)
    for a, b, c in POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, betas: tuple[float, float], eps: float, dtype):
        super().__init__(groups, {"lr": lr, "lr_ratio": 1.0, "weight_decay": 0.0, "momentum": momentum, "betas": betas, "eps": eps})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["matrices"]:
                self._muon(group, parameters)
            elif parameters:
                self._adamw(group, parameters)

    def _muon(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        momentum = group["momentum"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters]
        buffers = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        directions = torch._foreach_lerp(grads, buffers, momentum)
        by_shape = defaultdict(list)
        for parameter, direction in zip(parameters, directions):
            shape = parameter.shape[-2:]
            by_shape[shape].append((parameter, direction))
        for (rows, columns), members in by_shape.items():
            stack = torch.cat([d.reshape(-1, rows, columns) for _, d in members])
            stack = orthogonalise(stack, self.dtype)
            lr = group["lr"] * max(1.0, rows / columns) ** 0.5
            updates = stack.split([d.numel() // (rows * columns) for _, d in members])
            ps = [p for p, _ in members]
            if group["weight_decay"]: torch._foreach_mul_(ps, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(ps, [u.reshape(p.shape).to(p.dtype) for u, p in zip(updates, ps)], alpha=-lr)

    def _adamw(self, group, parameters) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        states = [self.state[p] for p in parameters]
        adamw(parameters, [p.grad for p in parameters], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
              fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
