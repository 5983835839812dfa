"""The peers' dataset: random windows of the same text. Imports only torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

STEPS = 100_000  # no timed run gets there


@dataclass(frozen=True)
class Task:
    text: Path
    out: Path  # an empty directory
    n_layer: int
    n_head: int
    n_embd: int
    context: int
    batch: int
    log_every: int  # steps


def task() -> Task:
    """Parse the command line; every field is an option."""
    options = argparse.ArgumentParser()
    for name in ("text", "out"):
        options.add_argument(f"--{name}", type=Path, required=True)
    for name in ("n_layer", "n_head", "n_embd", "context", "batch", "log_every"):
        options.add_argument(f"--{name}", type=int, required=True)
    return Task(**vars(options.parse_args()))


class Windows(Dataset):
    """Random windows (length,) of the first 90% of the text, enough for STEPS steps."""

    def __init__(self, text: Path, length: int, batch: int) -> None:
        characters = text.read_text(encoding="utf-8")
        tokens = {character: token for token, character in enumerate(sorted(set(characters)))}
        self.vocab_size = len(tokens)
        self.tokens = torch.tensor([tokens[c] for c in characters[: int(0.9 * len(characters))]])
        self.length, self.count = length, STEPS * batch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, _: int) -> Tensor:
        start = int(torch.randint(len(self.tokens) - self.length + 1, ()))
        return self.tokens[start : start + self.length]
