"""Compute a roofline for a step of `gpt` with AdamW in fp32.

It follows from the least work that a step needs and from the peak rates of this machine.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass

import torch
from common import ROOT, environment, in_fresh_process
from matmul_rate import fastest, measured_matmul_flops

from mingpt_ddp.config.keys.model_config import GPTConfig
from mingpt_ddp.models import count_parameters
from mingpt_ddp.models.gpt import GPT

HEAD, CHARACTERS = 32, 65  # width of an attention head; distinct characters of the text
COPY_BYTES = 1 << 26  # size of the copy that measures the memory's rate; larger than the caches


@dataclass(frozen=True)
class Point:
    layers: int = 4
    width: int = 128
    context: int = 64
    batch: int = 12
    corpus: int = 1_115_394  # characters
    ranks: int = 1


@dataclass(frozen=True)
class Machine:
    """The peak rates of a machine.

    Attributes:
        flops_per_s: FLOP/s of one core.
        bytes_per_s: Rate of copying memory, where reads and writes both count.
        imports_mb: Resident memory of a process with the imports of a run.
    """

    flops_per_s: float
    bytes_per_s: float
    imports_mb: float

    def or_better(self, other: Machine) -> Machine:
        """Combine two measurements. Take the better values: other load only lowers the rates."""
        rates = max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s)
        return Machine(*rates, min(self.imports_mb, other.imports_mb))


@dataclass(frozen=True)
class Needed:
    """The least work of a step on one rank.

    Attributes:
        flops: Number of floating-point operations.
        traffic: Bytes that are read and written.
        held: Bytes that are held in memory.
    """

    flops: float
    traffic: float
    held: float


def needed(point: Point) -> Needed:
    """Compute the least work of the rank with the most sequences.

    The backward pass needs at least the inputs of the matrices and of the attention, which are 10
    numbers per character, layer and channel. The forward and the backward pass read the weights,
    and the gradients are written. Clipping reads the gradients. AdamW reads the weights, the
    gradients and two moments, and writes the weights and the moments.
    """
    config = GPTConfig(
        name="gpt",
        architecture="gpt",
        n_layer=point.layers,
        n_head=point.width // HEAD,
        n_embd=point.width,
        dropout=0.0,
        bias=False,
        activation="gelu",
    )
    model = GPT(config, CHARACTERS, point.context)
    weights = count_parameters(model)
    characters = math.ceil(point.batch / point.ranks) * point.context
    activations = 4 * 10 * characters * point.layers * point.width
    flops = float(model.flops_per_token() * characters)
    return Needed(flops, 11 * 4 * weights + 2 * activations, 4 * 4 * weights + activations)


def limits(point: Point, machine: Machine) -> dict[str, float]:
    """Compute the least time of a step in ms, and the least memory of all ranks in MB."""
    least = needed(point)
    processes = point.ranks + (point.ranks > 1)  # several ranks also have a launcher
    return {
        "flops_ms": 1e3 * least.flops / machine.flops_per_s,
        "bytes_ms": 1e3 * least.traffic / machine.bytes_per_s,
        "held_mb": processes * machine.imports_mb + point.ranks * least.held / 1e6,
    }


def memory_rate(device: torch.device) -> float:
    """Measure the bytes per second of a copy, where reads and writes both count."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    names = {"source": source, "target": target, "torch": torch}
    return 2 * COPY_BYTES / fastest("target.copy_(source)", names)


def measured_rates() -> tuple[float, float]:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    return measured_matmul_flops(device, torch.float32), memory_rate(device)


def describe() -> Machine:
    """Measure the peak rates of this machine, and the memory of the imports."""
    script = (
        "import mingpt_ddp.training.run, resource; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", script]
    stdout = subprocess.run(
        command, cwd=ROOT, env=environment(1), capture_output=True, text=True, check=True
    ).stdout
    return Machine(*in_fresh_process(measured_rates), int(stdout) * 1024 / 1e6)
