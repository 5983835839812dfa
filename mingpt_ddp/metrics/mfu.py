"""MFU: a model's FLOP/s as a share of the device's, by data sheets and as measured."""

import re
import timeit

import torch
from torch import nn

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import flops_per_token

# n x n; operand and result of the largest take 270 MB in bf16
MATRIX_SIZES = (256, 512, 1024, 2048, 4096, 8192)
SATURATED_S = 0.002  # a product that takes this long saturates the device
REPETITIONS = 5  # per measurement; the fastest counts
# By the name that CUDA reports: TFLOP/s without sparsity in 16 bits, in TF32 and in fp32. Sources:
# NVIDIA's data sheets of V100, T4, A100, A800, A10, A10G, L4, L40, L40S, H100, H100 NVL, H200,
# GH200, H20, HGX B200, HGX B300 and GB200 NVL72 (a GPU of it), and its white papers on GA102 (RTX
# 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090). A800 and H800 are A100 and H100 with slower
# NVLink. Where a sheet has rates with sparsity only, half of them; for GeForce the rates with fp32
# accumulation. None: the GPU lacks TF32, and bf16 with it.
PEAK_TFLOPS: dict[str, tuple[float, float | None, float]] = {
    r"V100-SXM[23]-(16|32)GB": (125, None, 15.7),
    r"V100-PCIE-(16|32)GB": (112, None, 14),
    r"T4": (65, None, 8.1),
    r"A[18]00-(SXM4|PCIE)-(40|80)GB|A[18]00 80GB PCIe": (312, 156, 19.5),
    r"A10": (125, 62.5, 31.2),
    r"A10G": (70, 35, 31.5),
    r"RTX 3090": (71, 35.6, 35.6),
    r"L4": (121, 60, 30.3),
    r"L40": (181, 90.5, 90.5),
    r"L40S": (362, 183, 91.6),
    r"RTX 4090": (165.2, 82.6, 82.6),
    r"RTX 5090": (209.5, 104.8, 104.8),
    r"H100 80GB HBM3|H800|H200|GH200 \d+GB?( HBM3e)?": (989.5, 494.5, 67),
    r"H[18]00 PCIe": (756, 378, 51),
    r"H100 NVL|H200 NVL": (835.5, 417.5, 60),
    r"H20": (148, 74, 44),
    r"B200|B300 SXM6 AC": (2250, 1100, 75),
    r"GB200": (2500, 1250, 80),
}


def vendor_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the vendor's FLOP/s for products of this type; None on a CPU or an unlisted GPU."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), dtype)


def peak_flops_of(name: str, dtype: torch.dtype) -> float | None:
    """Return the vendor's FLOP/s of the GPU that CUDA reports by this name; None if unlisted."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", name)
    for pattern, (half, tf32, fp32) in PEAK_TFLOPS.items():
        if not re.fullmatch(pattern, name):
            continue
        if dtype == torch.bfloat16 and tf32 is None:
            return None
        if dtype != torch.float32:
            return half * 1e12
        if tf32 is None or torch.get_float32_matmul_precision() == "highest":
            return fp32 * 1e12
        return tf32 * 1e12
    return None


class Utilization:
    """The model's FLOP/s on one device, as a share of what the device could do.

    MFU divides by the rate in the vendor's data sheet, the matmul utilization by a measured one.
    """

    def __init__(self, runtime: Runtime, model: nn.Module) -> None:
        """
        Args:
            model: not wrapped; nothing is reported if it has no `flops_per_token()`.
        """
        self.runtime = runtime
        self._flops_per_token = flops_per_token(model)
        self._peak_flops = vendor_peak_flops(runtime.device, runtime.dtype)
        self._matmul_flops = 0.0  # until `measure_matmul`

    def measure_matmul(self) -> None:
        """Measure the device's matmul rate, if it is needed."""
        if self._flops_per_token is None:
            return
        device = self.runtime.device
        self._matmul_flops = measured_matmul_flops(device, self.runtime.dtype)
        if device.type == "cuda":
            # exclude the measurement's matrices
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self, tokens_per_s: float) -> dict[str, float]:
        """Return `speed/matmul_utilization` and, for a listed GPU, `speed/mfu`.

        Args:
            tokens_per_s: of all ranks.
        """
        if self._flops_per_token is None:
            return {}
        flops = self._flops_per_token * tokens_per_s / self.runtime.group.world_size
        metrics = {"speed/matmul_utilization": flops / self._matmul_flops}
        if self._peak_flops is not None:
            metrics["speed/mfu"] = flops / self._peak_flops
        return metrics


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest product of square matrices, with torch's thread count.

    Takes less than 0.1 seconds and draws nothing from torch's global generators.
    """
    size = MATRIX_SIZES[0]
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(size, size, generator=generator).to(device, dtype)
    best = 0.0
    for n in MATRIX_SIZES:
        # zeros would draw less power and run faster
        a = tile.repeat(n // size, n // size)
        out = torch.empty_like(a)
        seconds = fastest("torch.mm(a, a, out=out)", {"torch": torch, "a": a, "out": out})
        best = max(best, 2 * n**3 / seconds)
        if seconds > SATURATED_S:
            break
    return best


@torch.no_grad()
def fastest(statement: str, variables: dict[str, object]) -> float:
    """Return the shortest time of a statement in seconds; a GPU in use is synchronized."""
    wait = "; torch.cuda.synchronize()" if torch.cuda.is_initialized() else ""
    timer = timeit.Timer(statement + wait, globals=variables)
    return min(timer.repeat(REPETITIONS, number=1))
