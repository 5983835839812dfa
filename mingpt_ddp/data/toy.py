"""A toy regression: random vectors and a linear function of them."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from mingpt_ddp.config.components import DatasetConfig
from mingpt_ddp.data.rng import derive_seed
from mingpt_ddp.data.samples import Datasets

SIZES = {"train": 2048, "val": 256, "test": 256}
INPUTS = 10
OUTPUTS = 5
NOISE = 0.1


def toy(config: DatasetConfig) -> Datasets:
    """Return pairs x (10,), y = x W + noise (5,), the same in every run."""
    generator = torch.Generator().manual_seed(derive_seed("toy"))
    weight = torch.randn(INPUTS, OUTPUTS, generator=generator)
    splits: dict[str, Any] = {}
    for name, n in SIZES.items():
        x = torch.randn(n, INPUTS, generator=generator)
        noise = NOISE * torch.randn(n, OUTPUTS, generator=generator)
        splits[name] = TensorDataset(x, x @ weight + noise)
    return Datasets(**splits, outputs=OUTPUTS)
