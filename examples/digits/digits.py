"""Train a ConvNet on handwritten digits, on two ranks with SyncBatchNorm. No GPU is needed.

    python main.py --config-dir=examples/digits experiment=digits_convnet ddp.nproc_per_node=2

takes half a minute and classifies 99% of the test images correctly. The images come with
scikit-learn (pip install scikit-learn). To train on MNIST, name the directory or the URL of its
four idx files:

    python main.py --config-dir=examples/digits experiment=digits_convnet data=mnist data.path=DIR
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import fsspec
import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from mingpt_ddp.data.rng import derive_seed, feistel_permute
from mingpt_ddp.data.samples import Datasets
from mingpt_ddp.registry import (
    ClassesConfig,
    DataError,
    DatasetConfig,
    ModelConfig,
    check,
    register,
)
from mingpt_ddp.tasks import Mean, Task

CLASSES = 10
# Numbers of validation and test images among the 1,797 of scikit-learn.
DIGITS_VAL = 200
DIGITS_TEST = 300
# The last 5,000 of MNIST's 60,000 training images are used for validation.
MNIST_VAL = 5_000
IDX_UNSIGNED_BYTE = 8  # code of the type in an idx file
MAX_BYTES = 1 << 30  # largest size of an idx file; MNIST's largest has 47 million bytes


@register("task", "classification", ClassesConfig)
class Classification(Task):
    """Cross-entropy of model(x), logits (B, classes), with labels y (B,) int64."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        smoothing = getattr(self.config.task, "label_smoothing", 0.0)
        return F.cross_entropy(model(x).float(), y, label_smoothing=smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        x, y = batch
        logits = model(x).float()  # (B, classes)
        correct = (logits.argmax(dim=-1) == y).sum()
        return {
            "loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)),
            "accuracy": (correct, len(y)),
        }


class RandomShift(Dataset[Any]):
    """Samples (x, y) whose images x (C, H, W) are moved at random and padded with zeros.

    Before each call, mingpt_ddp seeds the random generators by the epoch and the sample.
    """

    def __init__(self, samples: TensorDataset, limit: int) -> None:
        """
        Args:
            samples: The samples to move.
            limit: Largest distance along each axis, in pixels.
        """
        self.samples = samples
        self.limit = limit

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        down, right = torch.randint(0, 2 * self.limit + 1, (2,)).tolist()
        _, height, width = x.shape
        padded = F.pad(x, [self.limit] * 4)
        return padded[:, down : down + height, right : right + width], y


def split(x: np.ndarray, y: np.ndarray, shift: int, val_start: int, test_start: int) -> Datasets:
    """Split images by position into training, validation and test images.

    Args:
        x: The images, (N, H, W), as uint8 or floats. They are scaled to [0, 1].
        y: The labels, (N,).
        shift: Largest distance in pixels by which training images are moved.
        val_start: Index of the first validation image.
        test_start: Index of the first test image.
    """
    content = np.ascontiguousarray(x).tobytes() + np.ascontiguousarray(y).tobytes()
    images = torch.from_numpy((x / max(1, x.max())).astype(np.float32))[:, None]
    labels = torch.from_numpy(y.astype(np.int64))

    def part(begin: int, end: int) -> TensorDataset:
        return TensorDataset(images[begin:end], labels[begin:end])

    train = part(0, val_start)
    return Datasets(
        train=RandomShift(train, shift) if shift else train,
        val=part(val_start, test_start),
        test=part(test_start, len(x)),
        outputs=CLASSES,
        sha256=hashlib.sha256(content).hexdigest(),
    )


@dataclass(frozen=True)
class DigitsConfig(DatasetConfig):
    """The keys of data=digits."""

    shift: Annotated[int, Field(ge=0, le=3)] = 0  # pixels


@register("dataset", "digits", DigitsConfig)
def digits(config: DigitsConfig) -> Datasets:
    """Load the 1,797 images (1, 8, 8), in a fixed random order: 1,297 train, 200 val, 300 test.

    Source: E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten Digits" (UCI), in
    scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("data=digits needs scikit-learn; pip install scikit-learn") from error
    bunch = load_digits()
    n = len(bunch.target)
    order = feistel_permute(np.arange(n), n, derive_seed("digits"))
    test_start = n - DIGITS_TEST
    val_start = test_start - DIGITS_VAL
    return split(bunch.images[order], bunch.target[order], config.shift, val_start, test_start)


@dataclass(frozen=True)
class MNISTConfig(DatasetConfig):
    """The keys of data=mnist."""

    path: str  # a directory or any fsspec URL
    shift: Annotated[int, Field(ge=0, le=8)] = 0  # pixels


@register("dataset", "mnist", MNISTConfig)
def mnist(config: MNISTConfig) -> Datasets:
    """Load the images (1, 28, 28): 55,000 train, 5,000 val, 10,000 test.

    Source: LeCun et al. 1998, "Gradient-based learning applied to document recognition".
    """
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(config.path, f"{part}-images", 3)
        labels = read_idx(config.path, f"{part}-labels", 1)
        if not 0 < len(images) == len(labels):
            raise DataError(
                f"{part} at data.path={config.path} has {len(images)} images and "
                f"{len(labels)} labels"
            )
        if labels.max() >= CLASSES:
            raise DataError(
                f"{part}-labels at data.path={config.path} has the label {labels.max()}, not 0 to 9"
            )
        parts.append((images, labels))
    (train, y), (test, y_test) = parts
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"the images at data.path={config.path} have two sizes, {train.shape[1:]} and "
            f"{test.shape[1:]}"
        )
    test_start = len(train)
    val_start = test_start - min(MNIST_VAL, test_start // 2)
    images = np.concatenate([train, test])
    labels = np.concatenate([y, y_test])
    return split(images, labels, config.shift, val_start, test_start)


def read_idx(directory: str, name: str, n_dims: int) -> np.ndarray:
    """Read an idx file, which may be compressed by gzip.

    Args:
        directory: Directory or URL of the file.
        name: First part of the file's name.
        n_dims: Number of dimensions of the array in the file.

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    name += f"-idx{n_dims}-ubyte"
    url = f"{directory.rstrip('/')}/{name}"
    for candidate in (f"{url}.gz", url):
        try:
            with fsspec.open(candidate, compression="infer") as file:
                return parse_idx(file, n_dims)
        except FileNotFoundError:
            continue
        # The type of the exception depends on the protocol of the URL.
        except Exception as error:
            raise DataError(f"cannot read {candidate}: {str(error)[:200]}") from error
    raise DataError(
        f"data.path={directory} has no {name} or {name}.gz; name the directory of MNIST's files"
    )


def parse_idx(file: Any, n_dims: int) -> np.ndarray:
    """Parse the content of an idx file.

    It has two zero bytes, the type, the number of dimensions, their sizes, and the values.

    Raises:
        ValueError: The file has another format, or it is cut off, too long or too large.
    """
    start = struct.unpack(">HBB", file.read(4))
    if start != (0, IDX_UNSIGNED_BYTE, n_dims):
        raise ValueError(f"it begins with {start}, not {(0, IDX_UNSIGNED_BYTE, n_dims)}")
    shape = struct.unpack(f">{n_dims}I", file.read(4 * n_dims))
    size = math.prod(shape)
    if size > MAX_BYTES:
        raise ValueError(f"it declares {size:,} bytes")
    values = file.read(size + 1)  # decompresses at most one byte too many
    if len(values) < size:
        raise ValueError(f"it has {len(values):,} of {size:,} bytes")
    if len(values) > size:
        raise ValueError("it is too long")
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum values over all ranks. A single process returns its own values."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


class AllReduceSum(torch.autograd.Function):
    """Sum values over all ranks, with gradients.

    The loss of every rank depends on the sum, so the backward pass sums the gradients too.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_over_ranks(grad)


class BatchNorm(nn.BatchNorm2d):
    """Batch normalization over all ranks that also works on CPUs, unlike torch's SyncBatchNorm.

    With ddp.sync_batchnorm=true a run on CPUs sets `over_all_ranks` before it trains. The run then
    gives every rank exactly one micro-batch in a step, so that all ranks compute the same sums. A
    run on GPUs replaces this class by torch's SyncBatchNorm.

    Source: Ioffe and Szegedy 2015, "Batch Normalization" (arXiv:1502.03167).
    """

    over_all_ranks = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each channel of x (B, C, H, W) by its mean and variance, in fp32."""
        if not (self.training and self.over_all_ranks):
            return super().forward(x)
        values = x.float()
        dims = (0, 2, 3)  # all but the channels
        shape = (1, -1, 1, 1)  # broadcasts one value per channel

        count = values.new_full((1,), values.numel() / values.shape[1])
        sums_and_count = torch.cat([values.sum(dims), count])  # (C + 1)
        total, n = AllReduceSum.apply(sums_and_count).split([self.num_features, 1])
        mean = total / n  # (C)
        centered = values - mean.view(shape)
        squares = (centered * centered).sum(dims)
        variance = AllReduceSum.apply(squares) / n  # (C)

        y = centered * torch.rsqrt(variance + self.eps).view(shape)
        y = torch.addcmul(self.bias.view(shape), y, self.weight.view(shape))
        with torch.no_grad():
            # torch's class allows None for these buffers, but this class always has them.
            assert self.running_mean is not None and self.running_var is not None
            assert self.num_batches_tracked is not None and self.momentum is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1).clamp_min(1), self.momentum)
        return y.to(x.dtype)


@dataclass(frozen=True)
class ConvNetConfig(ModelConfig):
    """The keys of model=convnet.

    Attributes:
        channels: Number of channels after the first convolution. The second doubles it.
        norm: The normalization: over the batch, or over the channels of a single image (group).
        dropout: Probability of dropping a feature before the last layer.
    """

    channels: Annotated[int, Field(ge=1)] = 16
    norm: Literal["batch", "group"] = "batch"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


@register("model", "convnet", ConvNetConfig)
class ConvNet(nn.Module):
    """A ConvNet that turns images into logits.

    It has GELU and average pooling instead of ReLU and max pooling. These two would turn a rounding
    difference of 1e-8 between world sizes into a different gradient, and the losses would drift
    apart.
    """

    def __init__(self, config: ConvNetConfig, outputs: int, inputs: tuple[int, ...]) -> None:
        """
        Args:
            config: The keys of the model.
            outputs: Number of classes.
            inputs: Shape (C, H, W) of an image. For a text it is its length, which is refused.
        """
        check(
            isinstance(inputs, tuple) and len(inputs) == 3 and min(inputs[1:]) >= 4,
            f"model.architecture=convnet needs images (C, H, W) of at least 4 x 4, not {inputs}, "
            "as in data=digits",
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
        self.head = nn.Linear(2 * n * (H // 4) * (W // 4), outputs)

    @staticmethod
    def _stage(inputs: int, outputs: int, norm: str) -> list[nn.Module]:
        """Make the layers of a stage, which halves the height and the width."""
        return [
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            BatchNorm(outputs) if norm == "batch" else nn.GroupNorm(1, outputs),
            nn.GELU(),
            nn.AvgPool2d(2),
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (B, classes) of images (B, C, H, W)."""
        return self.head(self.layers(images))
