"""A small convolutional network for images: two convolutional stages and a linear layer.

GELU and means instead of ReLU and maxima: those turn a rounding difference of 1e-8 between world
sizes into another gradient, and the losses drift apart.

Shapes: B images of C channels, H x W pixels.
"""

from torch import Tensor, nn

from mingpt_ddp.config.components import ConvNetConfig
from mingpt_ddp.errors import ConfigError


class ConvNet(nn.Module):
    """Images in, logits out."""

    def __init__(self, config: ConvNetConfig, outputs: int, inputs: tuple[int, ...]) -> None:
        """
        Args:
            outputs: number of classes.
            inputs: (C, H, W) of an image.

        Raises:
            ConfigError: the inputs are not images of at least 4 x 4 pixels.
        """
        if not isinstance(inputs, tuple) or len(inputs) != 3 or min(inputs[1:]) < 4:
            raise ConfigError(
                "model.architecture=convnet needs images (C, H, W) of at least 4 x 4, not "
                f"{inputs}, as in data=digits"
            )
        super().__init__()
        C, H, W = inputs
        n = config.channels
        self.layers = nn.Sequential(
            *self._stage(C, n, config.norm),  # (B, n, H/2, W/2)
            *self._stage(n, 2 * n, config.norm),  # (B, 2n, H/4, W/4)
            nn.Flatten(),
            nn.Dropout(config.dropout),
        )
        features = 2 * n * (H // 4) * (W // 4)
        self.head = nn.Linear(features, outputs)

    @staticmethod
    def _stage(inputs: int, outputs: int, norm: str) -> list[nn.Module]:
        """Return the layers of a stage, which halves height and width."""
        return [
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(1, outputs),
            nn.GELU(),
            nn.AvgPool2d(2),
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, C, H, W)."""
        features = self.layers(images)
        logits: Tensor = self.head(features)
        return logits
