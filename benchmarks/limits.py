"""A roofline for a step of `gpt` with AdamW in fp32: its least work, this machine's peak rates."""

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
BLOCK = 1 << 26  # bytes to copy: larger than the caches


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
    """Peak rates of the machine."""

    flops_per_s: float  # of one core
    bytes_per_s: float
    imports_mb: float  # resident memory of a process that has imported what a run imports

    def or_better(self, other: Machine) -> Machine:
        """Return the best of two measurements: other load only lowers the rates."""
        rates = max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s)
        return Machine(*rates, min(self.imports_mb, other.imports_mb))


@dataclass(frozen=True)
class Needed:
    """Least work of a step on one rank."""

    flops: float
    traffic: float  # bytes
    held: float  # bytes


def needed(point: Point) -> Needed:
    """Return the least work of the rank with the most sequences.

    The backward pass needs at least the inputs of the matrices and of the attention: 10 numbers per
    character, layer and channel. The weights are read forward and backward and their gradients
    written; clipping reads those, AdamW reads weights, gradients and two moments and writes all but
    the gradients.
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
    """Return the least time of a step in ms, and the least memory of all ranks in MB."""
    least = needed(point)
    processes = point.ranks + (point.ranks > 1)  # plus the launcher
    return {
        "flops_ms": 1e3 * least.flops / machine.flops_per_s,
        "bytes_ms": 1e3 * least.traffic / machine.bytes_per_s,
        "held_mb": processes * machine.imports_mb + point.ranks * least.held / 1e6,
    }


def memory_rate(device: torch.device) -> float:
    """Return the bytes per second of a copy, reads and writes counted."""
    source = torch.ones(BLOCK, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    names = {"source": source, "target": target, "torch": torch}
    return 2 * BLOCK / fastest("target.copy_(source)", names)


def measured_rates() -> tuple[float, float]:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    return measured_matmul_flops(device, torch.float32), memory_rate(device)


def describe() -> Machine:
    script = (
        "import mingpt_ddp.training.run, resource; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", script]
    stdout = subprocess.run(
        command, cwd=ROOT, env=environment(1), capture_output=True, text=True, check=True
    ).stdout
    return Machine(*in_fresh_process(measured_rates), int(stdout) * 1024 / 1e6)
