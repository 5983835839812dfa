"""How fast a device multiplies matrices at most, measured, and how near to it a run comes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

SIZES = (256, 512, 1024, 2048, 4096)  # rows and columns of the matrices; 4096: 100 MB in bf16
ENOUGH_S = 0.004  # a product that takes this long keeps a device busy
PATIENCE_S = 0.03  # for measuring one size


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best product of two square matrices, with torch's present settings and number of threads.

    Takes about 0.2 seconds and draws nothing from torch's global generators.
    """
    tile = torch.randn(SIZES[0], SIZES[0], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    best = 0.0
    for n in SIZES:
        a = tile.repeat(n // SIZES[0], n // SIZES[0])  # zeros would take less power, and so be faster
        product = torch.empty_like(a)
        seconds = fastest(lambda a=a, product=product: torch.mm(a, a, out=product), device)  # type: ignore[misc]
        best = max(best, 2 * n**3 / seconds)
        if seconds > ENOUGH_S:
            break
    return best


@torch.no_grad()
def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call at its fastest; the device is looked at after several short ones together."""
    best, calls = math.inf, 1
    work()
    _wait(device)
    until = time.perf_counter() + PATIENCE_S
    while (begin := time.perf_counter()) < until or best == math.inf:
        for _ in range(calls):
            work()
        _wait(device)
        seconds = time.perf_counter() - begin
        best = min(best, seconds / calls)
        if seconds < ENOUGH_S:
            calls *= 2
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MatmulUtilization:
    """The share of this rank's peak that training uses (MFU: Chowdhery et al. 2022, "PaLM", arXiv:2204.02311)."""

    def __init__(self, flops_per_token: float | None, device: torch.device, dtype: torch.dtype) -> None:
        """
        Args:
            flops_per_token: of a forward and backward; None: the model does not say, and the share is not known.
        """
        self._flops, self._device, self._dtype = flops_per_token, device, dtype
        self._peak: float | None = None  # FLOP/s

    def measure(self) -> None:
        """Find the peak out, the first time."""
        if self._flops is None or self._peak is not None:
            return
        self._peak = measured_matmul_flops(self._device, self._dtype)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # those matrices are not the run's

    def share(self, tokens_per_s: float) -> float | None:
        """Of the measured peak, at so many tokens per second on this rank."""
        if self._flops is None or self._peak is None:
            return None
        return self._flops * tokens_per_s / self._peak
