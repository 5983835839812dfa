"""The strategies whose communication docs/communication.md lists."""

from __future__ import annotations

from fake_gpu.cases import Case

RANKS = 8
STRATEGIES = {
    "ddp": Case(strategy="ddp", ranks=RANKS, precision="bf16"),
    "zero1": Case(strategy="zero1", ranks=RANKS, precision="bf16"),
    "fsdp": Case(strategy="fsdp", ranks=RANKS, precision="bf16"),
    "hsdp": Case(strategy="hsdp", ranks=RANKS, precision="bf16"),
    "tensor_parallel=2": Case(strategy="tensor", ranks=RANKS, precision="bf16"),
    "ddp, Muon": Case(strategy="ddp", ranks=RANKS, precision="bf16", optimizer="muon"),
}
