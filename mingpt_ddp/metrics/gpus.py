"""Memory sizes and link rates of the GPUs that the command `plan` knows, from data sheets."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from mingpt_ddp.config.validation import check

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One model of GPU, and the rate of its link to the other GPUs of a node."""

    name: str  # as CUDA reports it
    memory: int  # bytes that CUDA reports, rounded down to whole GiB
    # Bytes per second that the GPU can send while it receives at the same rate.
    link: float


# Sources: NVIDIA's data sheets of H100, H200, HGX B200, A100 and L40S, and its white paper on Ada
# (RTX 4090). CUDA reports less memory than the data sheets (for L40S because of error correction).
# Data sheets add up both directions of NVLink, or of PCIe 4.0 with 16 lanes; we list half of that.
# The rates of matrix products are in mfu.py.
GPUS = {
    "a100-40gb": GPU("NVIDIA A100-SXM4-40GB", 39 * GIB, 300 * GB),
    "a100-80gb": GPU("NVIDIA A100-SXM4-80GB", 79 * GIB, 300 * GB),
    "h100": GPU("NVIDIA H100 80GB HBM3", 79 * GIB, 450 * GB),
    "h200": GPU("NVIDIA H200", 139 * GIB, 450 * GB),
    "b200": GPU("NVIDIA B200", 178 * GIB, 900 * GB),
    "l40s": GPU("NVIDIA L40S", 44 * GIB, 32 * GB),
    "4090": GPU("NVIDIA GeForce RTX 4090", 23 * GIB, 32 * GB),
}


@dataclass(frozen=True)
class Machine:
    """The GPUs that a plan is made for, and the network between their nodes."""

    device: str  # a key of GPUS
    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    # Rate at which one node can send, over all its network adapters together.
    network_gbps: Annotated[float, Field(ge=1e-3, le=1e9)] = 400.0

    def __post_init__(self) -> None:
        check(
            self.device in GPUS,
            f"device={self.device} is not known; use one of {', '.join(GPUS)}",
        )
