"""examples/digits: reading MNIST's idx files and scikit-learn's digits, the shift, the model."""

from __future__ import annotations

import gzip
import struct
import sys
from types import ModuleType, SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from launching import ROOT
from multiprocess.ranks import configure
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from mingpt_ddp.config.builders import run_file
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import run_name
from mingpt_ddp.data.samples import Datasets
from mingpt_ddp.errors import ConfigError, DataError

SIZES = {"train": 40, "t10k": 10}


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def files() -> dict[str, bytes]:
    """Return the four files of a small MNIST: image i is filled with the value i."""
    content = {}
    for split, n in SIZES.items():
        images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None], (n, 28, 28))
        content[f"{split}-images-idx3-ubyte"] = idx(images)
        content[f"{split}-labels-idx1-ubyte"] = idx((np.arange(n) % 10).astype(np.uint8))
    return content


def write(directory, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        (directory / name).write_bytes(data)


@pytest.fixture
def example() -> ModuleType:
    """Load the code of the example in the way that a run does."""
    run_file(ROOT / "examples" / "digits" / "digits.py", "code")
    return next(module for name, module in sys.modules.items() if name.startswith("_own_digits_"))


def read(example: ModuleType, path: object) -> Datasets:
    return example.mnist(example.MNISTConfig(name="mnist", dataset="mnist", path=str(path)))


def test_classification(example):
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    task = example.Classification.__new__(example.Classification)
    task.config = SimpleNamespace(task=SimpleNamespace(label_smoothing=0.0))
    metrics = task.metrics(nn.Identity(), (logits, labels))
    expected = pytest.approx(float(F.cross_entropy(logits, labels)))
    assert float(metrics["loss"][0]) / metrics["loss"][1] == expected
    assert (int(metrics["accuracy"][0]), metrics["accuracy"][1]) == (2, 3)
    assert float(task.loss(nn.Identity(), (logits, labels))) == expected
    assert task.describe({"loss": 0.5, "accuracy": 2 / 3}) == "loss 0.5000, accuracy 0.6667"


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(example, tmp_path, zipped):
    content = files()
    if zipped:
        content = {f"{name}.gz": gzip.compress(data) for name, data in content.items()}
    write(tmp_path, content)
    datasets = read(example, tmp_path)
    assert [len(split) for split in (datasets.train, datasets.val, datasets.test)] == [20, 20, 10]
    image, label = datasets.val[3]
    assert image.shape == (1, 28, 28) and image.dtype == torch.float32
    assert torch.allclose(image, torch.full((1, 28, 28), 23 / 39)) and label == 3
    assert datasets.outputs == 10 and len(datasets.sha256) == 64


def test_files_of_a_url(example, tmp_path):
    write(tmp_path, files())
    remote = fsspec.filesystem("memory")
    for name, data in files().items():
        remote.pipe(f"/mnist/{name}", data)
    try:
        assert read(example, "memory://mnist").sha256 == read(example, tmp_path).sha256
    finally:
        remote.rm("/mnist", recursive=True)


IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (f"t10k-{LABELS}", None, f"has no t10k-{LABELS} or t10k-{LABELS}.gz; name"),
        (f"train-{IMAGES}", b"", f"cannot read .*/train-{IMAGES}: unpack requires a buffer of 4 b"),
        (f"train-{IMAGES}.gz", b"\x1f\x8bxx", "cannot read .*"),
        (f"train-{IMAGES}", idx(np.zeros((9, 2, 2), np.uint8))[:-1], "it has 35 of 36 bytes"),
        (f"train-{IMAGES}", struct.pack(">HBB3I", 0, 8, 3, *[1 << 31] * 3), "it declares 9,9.* by"),
        (f"train-{LABELS}", b"\0\0\x0d\1" + bytes(8), r"begins with \(0, 13, 1\), not \(0, 8, 1\)"),
        (
            f"train-{LABELS}",
            idx(np.zeros((40, 1), np.uint8)),
            r"begins with \(0, 8, 2\), not \(0, 8",
        ),
        (f"train-{LABELS}", idx(np.zeros(40, np.uint8)) + b"x", "it is too long"),
        (f"train-{LABELS}", idx(np.zeros(39, np.uint8)), "train at .* has 40 images and 39 labels"),
        (
            f"t10k-{LABELS}",
            idx(np.full(10, 10, np.uint8)),
            "t10k-labels .* has the label 10, not 0",
        ),
        (
            f"t10k-{IMAGES}",
            idx(np.zeros((10, 9, 9), np.uint8)),
            r"two sizes, \(28, 28\) and \(9, 9\)",
        ),
        (f"t10k-{IMAGES}", idx(np.zeros((0, 28, 28), np.uint8)), "has 0 images and 10 labels"),
    ],
)
def test_an_invalid_file_gives_one_line(example, tmp_path, name, data, message):
    write(tmp_path, files())
    (tmp_path / name.removesuffix(".gz")).unlink()
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"^data error: .*{message}"):
        read(example, tmp_path)


def test_a_compressed_file_is_read_no_further_than_it_declares(example, tmp_path):
    """A few kilobytes may expand to gigabytes of zeros. The damage at their end is not reached."""
    write(tmp_path, files())
    name = f"train-{LABELS}"
    (tmp_path / name).unlink()
    content = gzip.compress(idx(np.zeros(40, np.uint8)) + bytes(1 << 24), mtime=0)
    (tmp_path / f"{name}.gz").write_bytes(content[:-9])
    with pytest.raises(DataError, match="it is too long"):
        read(example, tmp_path)


def test_black_images(example, tmp_path):
    black = {f"{part}-{IMAGES}": idx(np.zeros((n, 9, 9), np.uint8)) for part, n in SIZES.items()}
    write(tmp_path, files() | black)
    assert not read(example, tmp_path).train[0][0].any()


def test_digits(example):
    pytest.importorskip("sklearn")
    datasets = example.digits(example.DigitsConfig(name="digits", dataset="digits"))
    splits = (datasets.train, datasets.val, datasets.test)
    assert [len(split) for split in splits] == [1297, 200, 300]
    assert datasets.train[0][0].shape == (1, 8, 8)
    for split in splits:
        assert {int(y) for _, y in split} == set(range(10))
        assert all(x.min() >= 0 and x.max() <= 1 for x, _ in split)


def test_a_shift_moves_the_image_and_pads_with_zeros(example):
    image = torch.arange(1.0, 10.0).view(1, 3, 3)
    shifted = example.RandomShift(TensorDataset(image[None], torch.tensor([7])), 1)
    seen = set()
    for seed in range(100):
        torch.manual_seed(seed)
        x, y = shifted[0]
        assert x.shape == (1, 3, 3) and y == 7
        seen.add(tuple(x.flatten().tolist()))
    assert len(seen) == 9
    assert (0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 4.0, 5.0) in seen
    assert tuple(image.flatten().tolist()) in seen


def test_the_model_accepts_only_images(example):
    config = from_mapping(configure("experiment=digits_convnet")).model
    for inputs in (64, (10,), (1, 3, 8)):  # a text, vectors, too few pixels
        with pytest.raises(ConfigError, match=r"convnet needs images \(C, H, W\) of at least 4 x"):
            example.ConvNet(config, 10, inputs)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["experiment=digits_convnet"], "digits-convnet-4408082d"),
        (["experiment=digits_convnet", "data=mnist", "data.path=D"], "mnist-convnet-8ba179e7"),
        (["experiment=toy"], "toy-toy-079dc69d"),
    ],
)
def test_runs_keep_their_names_from_when_the_package_had_these_presets(overrides, name):
    assert run_name(from_mapping(configure(*overrides))) == name
