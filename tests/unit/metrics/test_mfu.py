"""Peak FLOP/s by vendor, for each precision of known GPUs."""

from __future__ import annotations

import re

import pytest
import torch

from mingpt_ddp.metrics import mfu
from mingpt_ddp.metrics.mfu import vendor_peak_flops

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def peak(monkeypatch):
    """Return a function that finds the peak in TFLOP/s by the CUDA name of a GPU."""

    def find(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        found = vendor_peak_flops(CUDA, dtype)
        return found and found / 1e12

    return find


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GH200 144G HBM3e", 989.5),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA H20", 148),
        ("NVIDIA H800", 989.5),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA A800 80GB PCIe", 312),
        ("Tesla V100-SXM2-16GB", None),  # without bf16
        ("Tesla T4", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),  # another chip
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of one
        ("NVIDIA GH200 480GB MIG 1g.12gb", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_names(name, tflops, peak):
    assert peak(name) == tflops


@pytest.mark.parametrize(
    ("name", "tf32"), [("NVIDIA GB200", 1250), ("NVIDIA B200", 1100), ("NVIDIA H20", 74)]
)
def test_a_name_within_another_is_another_gpu(name, tf32, peak, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak(name, torch.float32) == tf32


def test_precisions(peak, monkeypatch):
    assert peak("Tesla V100-SXM2-16GB", torch.float16) == 125
    assert peak("NVIDIA A100-SXM4-40GB", torch.float16) == 312
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peak("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak("NVIDIA A100-SXM4-40GB", torch.float32) == 156
    assert peak("Tesla T4", torch.float32) == 8.1  # has no TF32


def test_a_cpu_has_none():
    assert vendor_peak_flops(CPU, torch.float32) is None


def test_rates_are_plausible():
    """Detects typos in the table: 16 bits are fastest, and fp32 is no faster than TF32."""
    for pattern, (half, tf32, fp32) in mfu.PEAK_TFLOPS.items():
        assert re.compile(pattern) and 60 <= half <= 2500
        assert fp32 <= (tf32 or half) <= half
        assert tf32 is None or 1.9 <= half / tf32 <= 2.1
