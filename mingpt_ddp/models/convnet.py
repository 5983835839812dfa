"""A small convolutional network for images: two convolutions with batch normalization and pooling,
one linear layer.

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
            *self._stage(C, n),
            *self._stage(n, 2 * n),
            nn.Flatten(),
            nn.Dropout(config.dropout),
        )
        self.head = nn.Linear(2 * n * (H // 4) * (W // 4), outputs)

    @staticmethod
    def _stage(inputs: int, outputs: int) -> list[nn.Module]:
        """Halve height and width."""
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.GELU(), nn.AvgPool2d(2)]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, C, H, W)."""
        logits: Tensor = self.head(self.layers(images))
        return logits
