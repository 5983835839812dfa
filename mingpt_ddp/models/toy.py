"""The toy model of the DDP tutorials: two linear layers."""

from torch import Tensor, nn

from mingpt_ddp.config.components import ModelConfig

HIDDEN = 10


class ToyModel(nn.Module):
    """Vectors in, vectors out."""

    def __init__(self, config: ModelConfig, outputs: int, inputs: tuple[int, ...]) -> None:
        super().__init__()
        self.net1 = nn.Linear(inputs[0], HIDDEN)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(HIDDEN, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs) for x (B, inputs)."""
        y: Tensor = self.net2(self.relu(self.net1(x)))
        return y
