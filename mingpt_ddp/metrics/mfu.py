"""Model FLOPs utilization (MFU): the model's FLOP/s divided by the peak in the data sheet."""

import re

import torch
from torch import nn

from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import flops_per_token

# TFLOP/s without sparsity in 16 bits, in TF32 and in fp32. A key matches the name of a GPU as CUDA
# reports it, without "NVIDIA". The rate in TF32 is None if the GPU has neither TF32 nor bf16.
# Sources: NVIDIA's data sheets of V100, T4, A100, A800, A10, A10G, L4, L40, L40S, H100, H100 NVL,
# H200, GH200, H20, HGX B200, HGX B300 and GB200 NVL72 (one GPU of it), and its white papers on
# GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090). A800 and H800 are A100 and H100
# with slower NVLink. If a sheet has only rates with sparsity, we take half of them. For GeForce we
# take the rates with fp32 accumulation.
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
    """Look up the device's peak FLOP/s for matrix products in this type.

    Return None for a CPU or an unlisted GPU.
    """
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), dtype)


def peak_flops_of(name: str, dtype: torch.dtype) -> float | None:
    """Look up the peak FLOP/s of a GPU in the vendor's data sheet.

    Args:
        name: Name of the GPU as CUDA reports it.
        dtype: Type of the matrix products.

    Returns:
        None if the GPU is not listed, or cannot compute in this type.
    """
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
    """Compute the MFU of a run from its tokens per second."""

    def __init__(self, runtime: Runtime, model: nn.Module) -> None:
        """
        Args:
            model: The model itself, not its DDP wrapper. There is no MFU if it has no
                `flops_per_token()`.
        """
        flops = flops_per_token(model)
        peak = vendor_peak_flops(runtime.device, runtime.dtype)
        # Tokens per second over all ranks at an MFU of 100%.
        self._peak_tokens_per_s: float | None = None
        if flops is not None and peak is not None:
            self._peak_tokens_per_s = peak * runtime.group.world_size / flops

    def metrics(self, tokens_per_s: float) -> dict[str, float]:
        """Return the metric `speed/mfu`, or {} if the peak or the model's FLOPs are not known.

        Args:
            tokens_per_s: Tokens per second over all ranks.
        """
        if self._peak_tokens_per_s is None:
            return {}
        return {"speed/mfu": tokens_per_s / self._peak_tokens_per_s}
