"""Which configurations run on the fake GPU: every pair of values that can be combined, once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

VOCABULARY = 64
BLOCK = 16  # tokens of a context
MICRO = 2  # sequences of a micro-batch
WIDTH = 192  # large enough for Muon to divide its work
LAYERS = 2
HEADS = 4

# The factors with constraints between them, then those that combine with everything.
CONSTRAINED: dict[str, tuple[Any, ...]] = {
    "strategy": ("single", "ddp", "zero1", "fsdp", "hsdp", "tensor"),
    "ranks": (1, 8, 256),
    "optimizer": ("adamw", "muon", "sgd"),
    "precision": ("fp32", "bf16", "fp16"),
    "model": ("gpt", "modern"),
}
FREE: dict[str, tuple[Any, ...]] = {
    "accumulation": (1, 3),  # micro-batches of a rank
    "recompute": (False, True),
    "deterministic": (False, True),
    "ema": (False, True),
    "smoothing": (False, True),
    "skip": (False, True),  # the anomaly policy acts at once
    "last": (False, True),  # the last rank, or the first
}
FACTORS = {**CONSTRAINED, **FREE}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    """A configuration, as one value of each factor."""

    strategy: str = "single"
    ranks: int = 1
    optimizer: str = "adamw"
    precision: str = "fp32"
    model: str = "gpt"
    accumulation: int = 1
    recompute: bool = False
    deterministic: bool = False
    ema: bool = False
    smoothing: bool = False
    skip: bool = False
    last: bool = False

    def __str__(self) -> str:
        """Return a name for pytest's -k, without the values that are the default."""
        words = [f"{self.strategy}-on-{self.ranks}", self.model, self.optimizer, self.precision]
        words += [f"{self.accumulation}-micro"] if self.accumulation > 1 else []
        words += [name for name, values in FREE.items() if getattr(self, name) is True]
        return "-".join(words)

    @property
    def rank(self) -> int:
        return self.ranks - 1 if self.last else 0

    @property
    def tensor_size(self) -> int:
        return 2 if self.strategy == "tensor" else 1

    @property
    def copies(self) -> int:
        """The copies of the model that get different micro-batches."""
        return self.ranks // self.tensor_size

    @property
    def shards(self) -> int:
        """The ranks that divide the weights: of hsdp a node, or half of a single one."""
        if self.strategy == "hsdp":
            return 8 if self.ranks > 8 else self.ranks // 2
        return self.ranks if self.strategy == "fsdp" else 1

    def overrides(self) -> list[str]:
        strategy = "auto" if self.strategy == "tensor" else self.strategy
        return [
            f"model={self.model}_nano",
            f"model.n_embd={WIDTH}",
            f"model.n_layer={LAYERS}",
            f"model.n_head={HEADS}",
            f"model.dropout={0 if self.strategy == 'tensor' else 0.1}",
            f"optimizer={self.optimizer}",
            f"data.block_size={BLOCK}",
            f"ddp.strategy={strategy}",
            f"ddp.tensor_parallel={self.tensor_size}",
            f"task.label_smoothing={0.1 if self.smoothing else 0}",
            f"trainer.batch_size={self.accumulation * self.copies * MICRO}",
            f"trainer.micro_batch_size={MICRO}",
            f"trainer.precision={self.precision}",
            f"trainer.activation_checkpointing={self.recompute}",
            f"trainer.deterministic={self.deterministic}",
            f"trainer.ema={0.99 if self.ema else 'null'}",
            f"trainer.on_nonfinite={'skip' if self.skip else 'stop'}",
        ]

    def pairs(self) -> set[Pair]:
        values = [(name, getattr(self, name)) for name in FACTORS]
        return set(itertools.combinations(values, 2))


def is_allowed(case: Case) -> bool:
    """Return whether the program accepts the values of the constrained factors."""
    if (case.strategy == "single") != (case.ranks == 1):
        return False
    if case.strategy in ("fsdp", "hsdp"):
        return case.optimizer != "muon"
    if case.strategy == "tensor":
        return case.model == "gpt" and case.optimizer != "muon" and case.precision != "fp16"
    return True


def has_fake_kernels(case: Case) -> bool:
    """Return whether torch can compute the case without values: not SGD's fused kernel."""
    return case.optimizer != "sgd" or case.strategy in ("fsdp", "hsdp")


def combinations() -> Iterator[Case]:
    """Yield every combination of the constrained factors, allowed or not."""
    for values in itertools.product(*CONSTRAINED.values()):
        yield Case(**dict(zip(CONSTRAINED, values, strict=True)))


def possible_pairs(cases: list[Case]) -> set[Pair]:
    """Return the pairs of values that these cases have, with any value of the free factors."""
    found: set[Pair] = set()
    for case in cases:
        for values in zip(*(FREE[name] * len(FREE) for name in FREE), strict=False):
            changed = {**vars(case), **dict(zip(FREE, values, strict=True))}
            found |= Case(**changed).pairs()
    for first, second in itertools.combinations(FREE, 2):
        for a, b in itertools.product(FREE[first], FREE[second]):
            found.add(((first, a), (second, b)))
    return found


def pairwise() -> list[Case]:
    """Return few cases that have every possible pair; the same ones each time.

    Each case begins with the constrained values that have most pairs still missing; then the free
    factors take one after the other the value that adds most.
    """
    candidates = [case for case in combinations() if is_allowed(case) and has_fake_kernels(case)]
    missing = possible_pairs(candidates)
    chosen = []
    while missing:
        found = _next_case(candidates, missing)
        gained = found.pairs() & missing
        assert gained, "the greedy choice adds nothing"
        missing -= gained
        chosen.append(found)
    return chosen


def _next_case(candidates: list[Case], missing: set[Pair]) -> Case:
    """Return the case with most of the missing pairs that the greedy choice finds."""
    best = max(candidates, key=lambda case: len(_filled(case, missing).pairs() & missing))
    return _filled(best, missing)


def _filled(case: Case, missing: set[Pair]) -> Case:
    """Return a case whose free factors have the values with most of the missing pairs."""
    known = {name: getattr(case, name) for name in CONSTRAINED}
    for name, values in FREE.items():

        def gain(value: Any, name: str = name) -> int:
            pairs = [((other, known[other]), (name, value)) for other in known]
            return sum(pair in missing for pair in pairs)

        known[name] = max(values, key=gain)
    return Case(**known)
