"""The vendors' peak FLOP/s of known GPUs, for each precision."""

from __future__ import annotations

import re

import pytest
import torch

from mingpt_ddp.metrics.mfu import PEAK_TFLOPS, peak_flops_of, vendor_peak_flops

HALF = torch.bfloat16


def peak(name: str, dtype: torch.dtype = HALF) -> float | None:
    """Return the peak in TFLOP/s of the GPU with this CUDA name."""
    found = peak_flops_of(name, dtype)
    return found and found / 1e12


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H20", 148),
        ("NVIDIA H800 PCIe", 756),
        ("Tesla V100-SXM2-16GB", None),  # does not support bf16
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),  # another chip than the desktop card
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # one seventh of the GPU
        ("", None),
    ],
)
def test_names(name, tflops):
    assert peak(name) == tflops


@pytest.mark.parametrize(
    ("name", "dtype", "fast", "slow"),
    [
        ("Tesla V100-SXM2-16GB", torch.float16, 125, 125),
        ("NVIDIA A100-SXM4-40GB", torch.float16, 312, 312),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 156, 19.5),
        ("Tesla T4", torch.float32, 8.1, 8.1),  # does not support TF32
        # B200 is a part of this name, but another GPU
        ("NVIDIA GB200", torch.float32, 1250, 80),
        ("NVIDIA B200", torch.float32, 1100, 75),
        ("NVIDIA H20", torch.float32, 74, 44),
    ],
)
def test_precisions(name, dtype, fast, slow):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak(name, dtype) == fast
        torch.set_float32_matmul_precision("highest")
        assert peak(name, dtype) == slow
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cpu_has_no_known_peak():
    assert vendor_peak_flops(torch.device("cpu"), torch.float32) is None


def test_rates_are_plausible():
    """This detects typos in the table: 16 bits are fastest, and fp32 is not faster than TF32."""
    for pattern, (half, tf32, fp32) in PEAK_TFLOPS.items():
        assert re.compile(pattern) and 60 <= half <= 2500
        assert fp32 <= (tf32 or half) <= half
        assert tf32 is None or 1.9 <= half / tf32 <= 2.1
