"""Train the toy model of PyTorch's DDP tutorials, two linear layers, to compute a linear function.

    python main.py --config-dir=examples/toy experiment=toy

takes a few seconds and prints one screen of log lines.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from mingpt_ddp.data.samples import Datasets
from mingpt_ddp.registry import DatasetConfig, ModelConfig, TaskConfig, check, register
from mingpt_ddp.tasks import Task

DATA_SEED = 7263598052450307654  # the same in every run
INPUTS = 10
HIDDEN = 10
OUTPUTS = 5
NOISE = 0.1


@register("task", "regression", TaskConfig)
class Regression(Task):
    """Mean squared error of model(x) and targets y, of the same shape."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).float(), y)


@register("dataset", "toy", DatasetConfig)
def toy(config: DatasetConfig) -> Datasets:
    """Draw samples of vectors x (10,) and y = x W + noise (5,)."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    weight = torch.randn(INPUTS, OUTPUTS, generator=generator)

    def draw(n: int) -> TensorDataset:
        x = torch.randn(n, INPUTS, generator=generator)
        noise = NOISE * torch.randn(n, OUTPUTS, generator=generator)
        return TensorDataset(x, x @ weight + noise)

    return Datasets(train=draw(2048), val=draw(256), test=draw(256), outputs=OUTPUTS)


@register("model", "toy", ModelConfig)
class ToyModel(nn.Module):
    """Two linear layers that turn vectors into vectors."""

    def __init__(self, config: ModelConfig, outputs: int, inputs: tuple[int, ...]) -> None:
        # For a text, `inputs` is not a tuple but its length.
        is_vector = isinstance(inputs, tuple) and len(inputs) == 1
        check(is_vector, f"model.architecture=toy needs vectors, not {inputs}, as in data=toy")
        super().__init__()
        self.net1 = nn.Linear(inputs[0], HIDDEN)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(HIDDEN, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Compute vectors (B, outputs) from x (B, inputs)."""
        return self.net2(self.relu(self.net1(x)))
