"""Map-style datasets: order and augmentation are reproducible, and evaluations are complete."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.samples import (
    MAX_EVALUATION_BATCH,
    Datasets,
    SampleLoader,
    SampleSplit,
    build_datasets,
)
from mingpt_ddp.errors import CodeError, DataError

N, BATCH = 26, 12  # two steps per epoch, with two samples left over


class Augmented(torch.utils.data.Dataset):
    """Each sample consists of its index and one number from each global random generator."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int):
        numbers = torch.rand(()).item(), np.random.random(), random.random()
        return torch.tensor([index, *numbers], dtype=torch.float64)


def config(num_workers: int = 0) -> DatasetConfig:
    return DatasetConfig(name="own", dataset="own", num_workers=num_workers)


def make(num_workers: int = 0, seed: int = 1, batch: int = BATCH) -> SampleLoader:
    return SampleLoader(Augmented(), config(num_workers), batch, seed, on_gpu=False)


def steps(
    loader: SampleLoader, numbers: range, world_size: int = 1, micro: int = 2
) -> dict[int, torch.Tensor]:
    """Return the samples of each step, from all ranks, in the order of the micro-batches."""
    plan = BatchPlan(BATCH, micro, world_size)
    parts = {number: [] for number in numbers}
    for rank in range(world_size):
        for number in numbers:
            parts[number] += loader.get_batch(number, plan, rank)
    return {
        n: torch.cat([m.batch for m in sorted(part, key=lambda m: m.index)])
        for n, part in parts.items()
    }


EXPECTED = steps(make(), range(1, 6))


def test_an_epoch_has_every_sample_at_most_once_in_its_own_order():
    epochs = [torch.cat([EXPECTED[n], EXPECTED[n + 1]])[:, 0].int() for n in (1, 3)]
    assert all(len(epoch.unique()) == len(epoch) == 2 * BATCH for epoch in epochs)
    assert not torch.equal(*epochs)
    assert not torch.equal(steps(make(seed=2), range(1, 2))[1][:, 0], EXPECTED[1][:, 0])
    assert make().steps_per_epoch == 2
    with pytest.raises(
        DataError, match=r"26 samples, fewer than trainer.batch_size=27; use a smaller batch"
    ):
        make(batch=27)


def test_the_order_and_the_augmentation_of_a_seed_never_change():
    """A run that is resumed by a later version must continue with the same samples."""
    assert EXPECTED[1][:6, 0].tolist() == [19, 1, 16, 6, 15, 24]
    numbers = [0.1132261157, 0.7426297914, 0.1440163332]
    assert EXPECTED[3][0, 1:].tolist() == pytest.approx(numbers)


def test_augmentation_differs_from_sample_to_sample_and_epoch_to_epoch():
    for generator in (1, 2, 3):
        drawn = torch.cat([*EXPECTED.values()])[:, generator]
        assert len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_do_not_depend_on_workers_or_ranks(num_workers, world_size):
    """A loader can begin at any step, as after a kill. It can also repeat a step and go back, as
    after a rollback.
    """
    loader = make(num_workers)
    for first in (1, 4, 2):
        found = steps(loader, range(first, 6), world_size)
        assert all(torch.equal(found[n], EXPECTED[n]) for n in found)
    again = steps(loader, range(5, 6), world_size)[5]
    loader.close()
    assert torch.equal(again, EXPECTED[5])


@pytest.mark.parametrize(
    "n", [1, 2, MAX_EVALUATION_BATCH, MAX_EVALUATION_BATCH + 1, 5 * MAX_EVALUATION_BATCH + 7]
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_an_evaluation_has_every_sample_once(n, world_size):
    """This holds if the number of samples is not a multiple of the ranks, or a rank gets none."""
    split = SampleSplit(Augmented(n), config(), on_gpu=False)
    batches = [batch for rank in range(world_size) for batch in split.batches(rank, world_size)]
    assert len(batches) == len(split)
    assert torch.cat(batches)[:, 0].int().sort().values.tolist() == list(range(n))


def test_an_evaluation_is_always_the_same_and_may_be_limited():
    split = SampleSplit(Augmented(400), config(2), on_gpu=False, limit=300)
    first, again = (torch.cat([*split.batches(0, 1)]) for _ in range(2))
    assert torch.equal(first, again)
    indices = first[:, 0].int()
    assert len(indices.unique()) == 300 and indices.tolist() == sorted(indices.tolist())
    assert indices.max() > 350 and indices.min() < 50


@pytest.mark.parametrize(
    ("built", "error", "message"),
    [
        (Augmented(), CodeError, "the builder of data.dataset=own must return mingpt_ddp"),
        (Datasets(Augmented(), []), DataError, "the val split of data.dataset=own has no samples"),
    ],
)
def test_what_a_builder_returns_is_checked(built, error, message, monkeypatch):
    monkeypatch.setitem(BUILDERS["dataset"], "own", lambda config: built)
    with pytest.raises(error, match=message):
        build_datasets(config())


def test_the_digest_is_given_or_made_from_the_sizes(monkeypatch):
    given = Datasets(Augmented(), Augmented(), sha256="a" * 64)
    sizes = [Datasets(Augmented(), Augmented(n)).digest() for n in (26, 25)]
    assert given.digest() == "a" * 64 and sizes[0] != sizes[1] and len(sizes[0]) == 64
    monkeypatch.setitem(BUILDERS["dataset"], "own", lambda config: given)
    assert build_datasets(config()) is given


class Broken(Augmented):
    """A dataset that raises an error at each sample."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int):
        raise self.error


@pytest.mark.parametrize(
    ("num_workers", "error", "expected", "message"),
    [
        (1, ConnectionError("theirs"), ConnectionError, "Caught ConnectionError in DataLoader"),
        # the error if a worker is killed while it hands over a batch
        (0, ConnectionResetError(104, "reset"), RuntimeError, "a DataLoader worker was killed"),
        (0, EOFError(), RuntimeError, "a DataLoader worker was killed"),
    ],
)
def test_a_loader_process_that_is_killed(num_workers, error, expected, message):
    """The message is the one that torch gives if a worker is killed at any other moment.

    By that message, the log recognizes that the stack trace explains nothing.
    """
    split = SampleSplit(Broken(error), config(num_workers), on_gpu=False)
    with pytest.raises(expected, match=message):
        next(split.batches(0, 1))
