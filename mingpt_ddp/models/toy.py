"""The toy model of the DDP tutorials: two linear layers."""

from torch import Tensor, nn

from mingpt_ddp.config.components import ModelConfig
from mingpt_ddp.errors import ConfigError

HIDDEN = 10


class ToyModel(nn.Module):
    """Vectors in, vectors out."""

    def __init__(self, config: ModelConfig, outputs: int, inputs: tuple[int, ...]) -> None:
        if not isinstance(inputs, tuple) or len(inputs) != 1:
            raise ConfigError(
                f"model.architecture=toy needs vectors, not {inputs}, as in data=toy "
                "task=regression"
            )
        super().__init__()
        self.net1 = nn.Linear(inputs[0], HIDDEN)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(HIDDEN, outputs)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in order."""
        return nn.ModuleList([self.net1, self.net2])

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs) for x (B, inputs)."""
        y: Tensor = self.net2(self.relu(self.net1(x)))
        return y
