"""Images with labels: scikit-learn's digits, and MNIST from its idx files."""

import gzip
import hashlib
import io
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from mingpt_ddp.config.components import DigitsConfig, MNISTConfig
from mingpt_ddp.data.archives import GZIP
from mingpt_ddp.data.download import fetch, user_cache
from mingpt_ddp.data.rng import Ints, derive_seed, feistel_permute
from mingpt_ddp.data.samples import Datasets
from mingpt_ddp.data.texts import expanded_limit
from mingpt_ddp.errors import DataError

# of 1,797 images
DIGITS_VAL = 200
DIGITS_TEST = 300
MNIST_VAL = 5_000  # the last of the 60,000 training images
CLASSES = 10
IDX_TYPE = 8  # unsigned bytes
MAX_BYTES = 1 << 30  # of an idx file; MNIST has 47 million
MAX_EXPANSION = 100.0  # of a gzip file; MNIST's labels, the densest, expand 5 times


class RandomShift(Dataset[Any]):
    """Samples (x, y) whose images x (C, H, W) are moved at random, padded with zeros."""

    def __init__(self, samples: TensorDataset, limit: int) -> None:
        """
        Args:
            limit: pixels along each axis, at most.
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


def _split(x: Ints, y: Ints, shift: int, val_start: int, test_start: int) -> Datasets:
    """Return the images before `val_start` for training, those from `test_start` on for testing.

    Args:
        x: (N, H, W) uint8 or floats, scaled here to [0, 1].
        y: (N,) labels.
        shift: by how many pixels to move the training images.
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


def digits(config: DigitsConfig) -> Datasets:
    """Return the 1,797 images (1, 8, 8), shuffled once: 1,297 train, 200 val, 300 test.

    Source: E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten Digits" (UCI), in
    scikit-learn.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "data=digits needs scikit-learn; pip install 'mingpt_ddp[digits]'"
        ) from error
    found = load_digits()
    n = len(found.target)
    order = feistel_permute(np.arange(n), n, derive_seed("digits"))
    test_start = n - DIGITS_TEST
    val_start = test_start - DIGITS_VAL
    return _split(found.images[order], found.target[order], config.shift, val_start, test_start)


def mnist(config: MNISTConfig) -> Datasets:
    """Return the images (1, 28, 28): 55,000 train, 5,000 val, 10,000 test.

    Source: LeCun et al. 1998, "Gradient-based learning applied to document recognition".

    Raises:
        DataError: a file is missing or is not an idx file.
    """
    parts = []
    for part in ("train", "t10k"):
        images = _read_idx(config, f"{part}-images", 3)
        labels = _read_idx(config, f"{part}-labels", 1)
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
            f"the images at data.path={config.path} are {train.shape[1:]} and {test.shape[1:]}"
        )
    images = np.concatenate([train, test])
    labels = np.concatenate([y, y_test])
    test_start = len(train)
    val_start = test_start - min(MNIST_VAL, test_start // 2)
    return _split(images, labels, config.shift, val_start, test_start)


def _read_idx(config: MNISTConfig, name: str, n_dims: int) -> Ints:
    """Read an idx file, plain or gzip.

    It has two zero bytes, the type, the number of dimensions, their sizes, the values.
    """
    name += f"-idx{n_dims}-ubyte"
    cache = Path(config.cache_dir) if config.cache_dir is not None else user_cache()
    content = None
    for suffix in ("", ".gz"):
        try:
            if content is None:
                content = fetch(f"{config.path.rstrip('/')}/{name}{suffix}", cache, MAX_BYTES)
        except Exception as error:  # exceptions differ by protocol
            raise DataError(
                f"cannot read {name} at data.path={config.path}: {str(error)[:200]}"
            ) from error
    if content is None:
        raise DataError(
            f"data.path={config.path} has no {name} or {name}.gz; name the directory of "
            "MNIST's four files"
        )
    try:
        file: Any = io.BytesIO(content)
        if content.startswith(GZIP):
            file = gzip.GzipFile(fileobj=file)
        start = struct.unpack(">HBB", file.read(4))
        if start != (0, IDX_TYPE, n_dims):
            raise ValueError(f"it begins with {start}, not {(0, IDX_TYPE, n_dims)}")
        shape = struct.unpack(f">{n_dims}I", file.read(4 * n_dims))
        size = math.prod(shape)
        if size > expanded_limit(len(content), MAX_EXPANSION):
            raise ValueError(f"it declares {size:,} bytes, which is too many for its size")
        values = file.read(min(size, MAX_BYTES) + 1)  # no more than declared is decompressed
        if len(values) < size:
            raise ValueError(f"it has {len(values):,} of {size:,} bytes")
        if len(values) > size:
            raise ValueError("it is too long")
        return np.frombuffer(values, dtype=np.uint8).reshape(shape)
    except (ValueError, OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(
            f"{name} at data.path={config.path} is not an idx file of bytes: {error}"
        ) from error
