"""Measure the rate at which a device multiplies matrices."""

from __future__ import annotations

import timeit

import torch

# The matrices are n x n. The operand and the result of the largest product take 270 MB in bf16.
MATRIX_SIZES = (256, 512, 1024, 2048, 4096, 8192)
SATURATED_S = 0.002  # a product that takes at least this long saturates the device
REPETITIONS = 5  # number of repetitions of a measurement, of which the fastest counts


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of the fastest product of square matrices, with torch's thread count.

    This takes less than 0.1 seconds, and does not draw from torch's global generators.
    """
    size = MATRIX_SIZES[0]
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(size, size, generator=generator).to(device, dtype)
    best = 0.0
    for n in MATRIX_SIZES:
        # Random values are needed: a product of zeros draws less power and runs faster.
        a = tile.repeat(n // size, n // size)
        out = torch.empty_like(a)
        seconds = fastest("torch.mm(a, a, out=out)", {"torch": torch, "a": a, "out": out})
        best = max(best, 2 * n**3 / seconds)
        if seconds > SATURATED_S:
            break
    return best


@torch.no_grad()
def fastest(statement: str, variables: dict[str, object]) -> float:
    """Measure the shortest time of a statement in seconds. A GPU in use is synchronized."""
    wait = "; torch.cuda.synchronize()" if torch.cuda.is_initialized() else ""
    timer = timeit.Timer(statement + wait, globals=variables)
    return min(timer.repeat(REPETITIONS, number=1))
