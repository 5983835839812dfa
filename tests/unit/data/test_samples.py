"""Map-style datasets: the order, the augmentation, and what an evaluation covers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.data import samples
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.samples import MAX_BATCH, Datasets, SampleLoader, SampleSplit, build_datasets
from mingpt_ddp.errors import CodeError, DataError
from mingpt_ddp.registry import register

N, BATCH = 26, 12  # two steps an epoch; two samples are left over


class Augmented(torch.utils.data.Dataset):
    """Samples that show their index and one number of each global generator."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int):
        numbers = torch.rand(()).item(), np.random.random(), random.random()
        return torch.tensor([index, *numbers], dtype=torch.float64)


def config(num_workers: int = 0) -> DatasetConfig:
    return DatasetConfig(name="own", dataset="own", num_workers=num_workers)


def make(num_workers: int = 0, seed: int = 1) -> SampleLoader:
    return SampleLoader(Augmented(), config(num_workers), BATCH, seed, on_gpu=False)


def steps(
    loader: SampleLoader, numbers: range, world_size: int = 1, micro: int = 2
) -> dict[int, torch.Tensor]:
    """Return the samples of each step, those of all ranks in the order of micro-batches."""
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
    epochs = [
        torch.cat([EXPECTED[1], EXPECTED[2]])[:, 0].int(),
        torch.cat([EXPECTED[3], EXPECTED[4]])[:, 0].int(),
    ]
    for epoch in epochs:
        assert len(epoch) == len(epoch.unique()) == 2 * BATCH
    assert not torch.equal(*epochs)
    assert make().steps_per_epoch == 2


def test_augmentation_differs_from_sample_to_sample_and_epoch_to_epoch():
    for generator in (1, 2, 3):
        drawn = torch.cat([*EXPECTED.values()])[:, generator]
        assert len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_do_not_depend_on_workers_or_ranks(num_workers, world_size):
    loader = make(num_workers)
    found = steps(loader, range(1, 6), world_size)
    loader.close()
    assert all(torch.equal(found[n], EXPECTED[n]) for n in EXPECTED)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("first", [2, 4, 5])
def test_a_loader_can_begin_at_any_step(num_workers, first):
    """As after a kill in the middle of an epoch; and go back, as after a rollback."""
    loader = make(num_workers)
    for start in (first, 1):
        found = steps(loader, range(start, 6))
        assert all(torch.equal(found[n], EXPECTED[n]) for n in found)
    loader.close()


def test_a_step_can_be_fetched_again():
    loader, plan = make(), BatchPlan(BATCH, BATCH, 1)
    first, again = (loader.get_batch(3, plan, 0)[0].batch for _ in range(2))
    assert torch.equal(first, again)


def test_another_seed_has_another_order():
    other = steps(make(seed=2), range(1, 2))[1]
    assert not torch.equal(other[:, 0], EXPECTED[1][:, 0])


def test_too_few_samples():
    with pytest.raises(
        DataError, match=r"26 samples, fewer than trainer.batch_size=27; use a smaller batch"
    ):
        SampleLoader(Augmented(), config(), 27, 1, on_gpu=False)


@pytest.mark.parametrize("n", [1, 2, MAX_BATCH - 1, MAX_BATCH, MAX_BATCH + 1, 5 * MAX_BATCH + 7])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_an_evaluation_has_every_sample_once(n, world_size):
    """Also if their number is no multiple of the ranks, or a rank gets none."""
    split = SampleSplit(Augmented(n), config(), on_gpu=False)
    batches = [batch for rank in range(world_size) for batch in split.batches(rank, world_size)]
    assert len(batches) == len(split)
    assert torch.cat(batches)[:, 0].int().sort().values.tolist() == list(range(n))


def test_an_evaluation_does_not_change_and_may_be_a_part():
    split = SampleSplit(Augmented(400), config(2), on_gpu=False, limit=300)
    first, again = (torch.cat([*split.batches(0, 1)]) for _ in range(2))
    assert torch.equal(first, again)
    indices = first[:, 0].int()
    assert len(indices.unique()) == 300 and indices.tolist() == sorted(indices.tolist())
    assert indices.max() > 350 and indices.min() < 50


@pytest.fixture
def registered(monkeypatch):
    """Return a function that registers a dataset as `own` and builds it."""
    from mingpt_ddp.config import builders

    def build(datasets) -> Datasets:
        for names in (builders.BUILDERS["dataset"], GROUPS["data"][1]):
            monkeypatch.setitem(names, "own", None)
            del names["own"]
        register("dataset", "own", DatasetConfig)(lambda config: datasets)
        return build_datasets(config())

    return build


def test_what_a_builder_returns_is_checked(registered):
    assert len(registered(Datasets(Augmented(), Augmented())).digest()) == 64
    with pytest.raises(
        CodeError, match=r"the dataset own must be mingpt_ddp.data.samples.Datasets"
    ):
        registered(Augmented())
    with pytest.raises(DataError, match=r"the val split of data.dataset=own has no samples"):
        registered(Datasets(Augmented(), []))


def test_the_digest_is_of_the_content_if_it_is_given():
    assert Datasets(Augmented(), Augmented(), sha256="a" * 64).digest() == "a" * 64
    assert (
        Datasets(Augmented(), Augmented()).digest() != Datasets(Augmented(), Augmented(25)).digest()
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ConnectionResetError(104, "reset by peer"),
            (RuntimeError, "a DataLoader worker was killed"),
        ),
        (EOFError(), (RuntimeError, "a DataLoader worker was killed")),
        (
            ConnectionError("Caught ConnectionError in DataLoader worker process 0."),
            (ConnectionError, "Caught"),
        ),
    ],
)
def test_a_loader_process_that_is_killed_while_it_passes_a_batch_on(error, expected):
    """As torch says at any other moment, and the log knows then that the trace explains nothing."""

    def batches():
        yield 1
        raise error

    found = samples._explained(batches())
    assert next(found) == 1
    with pytest.raises(expected[0], match=expected[1]):
        next(found)
