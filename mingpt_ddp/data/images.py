"""Images with labels: scikit-learn's digits, and MNIST from its idx files."""

import gzip
import hashlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from mingpt_ddp.config.components import DigitsConfig, MNISTConfig
from mingpt_ddp.data.download import fetch, user_cache
from mingpt_ddp.data.rng import Ints, derive_seed, feistel_permute
from mingpt_ddp.data.samples import Datasets
from mingpt_ddp.errors import DataError

DIGITS_VAL, DIGITS_TEST = 200, 300  # of 1,797 images
MNIST_VAL = 5_000  # the last of the 60,000 training images
IDX_TYPE = 8  # unsigned bytes


class RandomShift(Dataset[Any]):
    """Samples (x, y) whose images x (C, H, W) are moved by up to `limit` pixels along each axis, padded with zeros."""

    def __init__(self, samples: TensorDataset, limit: int) -> None:
        self.samples, self.limit = samples, limit

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        down, right = torch.randint(0, 2 * self.limit + 1, (2,)).tolist()
        height, width = x.shape[1:]
        return F.pad(x, [self.limit] * 4)[:, down : down + height, right : right + width], y


def _split(x: Ints, y: Ints, shift: int, *starts: int) -> Datasets:
    """Return the samples up to the first start for training, the next for validation, the rest for testing.

    Args:
        x: (N, H, W) uint8 or floats, scaled here to [0, 1].
        y: (N,) labels.
    """
    digest = hashlib.sha256(np.ascontiguousarray(x).tobytes() + np.ascontiguousarray(y).tobytes()).hexdigest()
    images = torch.from_numpy((x / x.max()).astype(np.float32))[:, None]
    labels = torch.from_numpy(y.astype(np.int64))
    train, val, test = (
        TensorDataset(images[begin:end], labels[begin:end])
        for begin, end in zip((0, *starts), (*starts, len(x)), strict=True)
    )
    return Datasets(RandomShift(train, shift) if shift else train, val, test, outputs=10, sha256=digest)


def digits(config: DigitsConfig) -> Datasets:
    """Return the 1,797 images (1, 8, 8) in an order that is shuffled once: 1,297 train, 200 val, 300 test.

    Source: E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten Digits" (UCI), in scikit-learn.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("data=digits needs scikit-learn: pip install 'mingpt-ddp[digits]'") from error
    found = load_digits()
    order = feistel_permute(np.arange(len(found.target)), len(found.target), derive_seed("digits"))
    n = len(order)
    return _split(found.images[order], found.target[order], config.shift, n - DIGITS_VAL - DIGITS_TEST, n - DIGITS_TEST)


def mnist(config: MNISTConfig) -> Datasets:
    """Return the images (1, 28, 28): 55,000 train, 5,000 val, 10,000 test.

    Source: LeCun et al. 1998, "Gradient-based learning applied to document recognition".

    Raises:
        DataError: a file is missing or is not an idx file.
    """
    parts = [_read_idx(config, name) for name in _names()]
    images, labels = (np.concatenate(parts[i::2]) for i in (0, 1))
    if len(images) != len(labels):
        raise DataError(f"data.path={config.path} has {len(images)} images and {len(labels)} labels")
    n = len(parts[0])
    return _split(images, labels, config.shift, n - min(MNIST_VAL, n // 2), n)


def _names() -> Iterator[str]:
    for split in ("train", "t10k"):
        yield from (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte")


def _read_idx(config: MNISTConfig, name: str) -> Ints:
    """Read an idx file, plain or gzip: two zero bytes, the type, the number of dimensions, their sizes, the values."""
    cache = Path(config.cache_dir) if config.cache_dir is not None else user_cache()
    content = None
    for suffix in ("", ".gz"):
        try:
            content = fetch(f"{config.path.rstrip('/')}/{name}{suffix}", cache) if content is None else content
        except Exception as error:  # exceptions differ by protocol
            raise DataError(f"cannot read {name} at data.path={config.path}: {str(error)[:200]}") from error
    if content is None:
        raise DataError(f"data.path={config.path} has no {name} or {name}.gz; name the directory of MNIST's four files")
    try:
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        zeros, kind, n_dims = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{n_dims}I", content, 4)
        values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * n_dims)
        if (zeros, kind) != (0, IDX_TYPE):
            raise ValueError(f"its type is {kind}")
        return values.reshape(shape)
    except (ValueError, OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"{name} at data.path={config.path} is not an idx file of bytes: {error}") from error
