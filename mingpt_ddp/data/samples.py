"""Load samples of map-style datasets, in an exact order at any world size.

Before a sample is read, torch's, NumPy's and Python's global generators are seeded from three
numbers: the run's seed, the epoch and the index of the sample. A random transform therefore differs
between samples and between epochs, but not between loader processes, ranks, world sizes or
restarts.
"""

import hashlib
import itertools
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.data.rng import derive_seed, feistel_permute
from mingpt_ddp.errors import CodeError, DataError
from mingpt_ddp.process.interrupts import SIGNALS
from mingpt_ddp.process.linux import die_with_parent
from mingpt_ddp.process.sockets import make_socket_directory

Key = tuple[int, int]  # epoch and index of a sample
MAX_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Datasets:
    """The splits of a dataset.

    Each split is a map-style torch Dataset with `len(split)` and `split[i]`. A sample is a tensor,
    or a tuple, list or dict of tensors and numbers.

    Attributes:
        train: The training split.
        val: The validation split.
        test: The test split, which is evaluated once, at the end of a run. None if the dataset has
            no test split.
        outputs: Number of outputs of the model: classes, or target features.
        sha256: SHA-256 of the dataset's content, or "" if it is not known. A run only resumes with
            the same hash.
    """

    train: Any
    val: Any
    test: Any = None
    outputs: int = 1
    sha256: str = ""

    def digest(self) -> str:
        """Return the SHA-256 of the content. If it is not given, hash the sizes of the splits."""
        if self.sha256:
            return self.sha256
        sizes = [len(split) for split in (self.train, self.val, self.test or ())]
        return hashlib.sha256(str(sizes).encode()).hexdigest()


def build_datasets(config: DatasetConfig) -> Datasets:
    """Build the datasets that `config` describes.

    Raises:
        CodeError: The user's builder did not return `Datasets`.
        DataError: The training or the validation split is empty, or the files cannot be read.
    """
    datasets = BUILDERS["dataset"][config.dataset](config)
    if not isinstance(datasets, Datasets):
        raise CodeError(
            f"the builder of data.dataset={config.dataset} must return "
            f"mingpt_ddp.data.samples.Datasets, not {type(datasets)}"
        )
    for name in ("train", "val"):
        if len(getattr(datasets, name)) == 0:
            raise DataError(f"the {name} split of data.dataset={config.dataset} has no samples")
    return datasets


class KeyedDataset(Dataset[Any]):
    """A dataset whose random transforms depend only on the key of the sample."""

    def __init__(self, dataset: Any, *purpose: int | str) -> None:
        """
        Args:
            dataset: The map-style dataset.
            purpose: Values that are hashed together with the key of each sample, such as the seed.
        """
        self.dataset = dataset
        self.purpose = purpose

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed = derive_seed(*self.purpose, epoch, index)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self.dataset[index]


def _loader(
    dataset: KeyedDataset, batches: Iterable[list[Key]], config: DatasetConfig, on_gpu: bool
) -> Iterator[Any]:
    """Load and collate the samples of each batch, in order. Loader processes start immediately.

    Args:
        dataset: The dataset.
        batches: The keys of the samples in each batch.
        config: The number of loader processes, and whether to pin memory.
        on_gpu: True if the batches are copied to a GPU.
    """
    # Loader processes hand over tensors through sockets.
    if config.num_workers:
        make_socket_directory()
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=config.num_workers,
        pin_memory=config.pin_memory and on_gpu,
        worker_init_fn=_set_up_loader_process,
        multiprocessing_context="fork" if config.num_workers else None,
    )
    return _with_loader_errors(iter(loader))


def _set_up_loader_process(_: int) -> None:
    """Let a loader process die with its rank, and ignore signals.

    A loader process has inherited the rank's lock and connections, so it must not outlive the rank.
    """
    die_with_parent()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _with_loader_errors(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, and turn a lost connection to a loader process into a clear error.

    Raises:
        RuntimeError: A loader process has ended while it handed over a batch. If it ends at another
            moment, torch itself raises a RuntimeError.
    """
    try:
        yield from batches
    except (ConnectionError, EOFError) as error:
        # torch adds these words to an exception that the dataset itself has raised. No connection
        # is lost then.
        if "DataLoader worker" in str(error):
            raise
        raise RuntimeError(
            "a DataLoader worker was killed while it passed a batch on; if memory ran out, lower "
            "data.num_workers"
        ) from error


class SampleLoader:
    """The training samples as an endless sequence of batches.

    An incomplete last batch of an epoch is dropped.
    """

    def __init__(
        self, dataset: Any, config: DatasetConfig, batch_size: int, seed: int, on_gpu: bool
    ) -> None:
        """
        Args:
            dataset: The training split.
            config: The settings of the dataset.
            batch_size: Number of samples in a step, over all ranks.
            seed: Seed of the order and of random transforms.
            on_gpu: True if the batches are copied to a GPU.

        Raises:
            DataError: The split has fewer samples than one batch.
        """
        self.config = config
        self.batch_size = batch_size
        self.seed = seed
        self.on_gpu = on_gpu
        self.n = len(dataset)
        self.items_per_step = batch_size
        self.steps_per_epoch = self.n // batch_size
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training split has {self.n} samples, fewer than "
                f"trainer.batch_size={batch_size}; use a smaller batch or more data"
            )
        self._dataset = KeyedDataset(dataset, "sample", seed)
        self._iterator: Iterator[Any] = iter(())
        # The iterator yields the micro-batches of this plan and rank.
        self._plan_and_rank: tuple[BatchPlan, int] | None = None
        self._step = 0  # step of the most recent batch
        self._batch = list[MicroBatch]()

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        """Return a rank's micro-batches in a step. Steps count from 1."""
        same_plan = self._plan_and_rank == (plan, rank)
        if same_plan and step == self._step:
            return self._batch
        if not same_plan or step != self._step + 1:
            keys = self._keys(step, plan, rank)
            self._iterator = _loader(self._dataset, keys, self.config, self.on_gpu)
        indices = plan.indices_for_rank(rank)
        self._batch = [MicroBatch(j, next(self._iterator)) for j in indices]
        self._plan_and_rank = (plan, rank)
        self._step = step
        return self._batch

    def close(self) -> None:
        """End the loader processes now.

        The garbage collector might destroy their queues first, and then wait for the processes.
        """
        self._iterator = iter(())

    def _keys(self, first: int, plan: BatchPlan, rank: int) -> Iterator[list[Key]]:
        """Yield the sample keys of a rank's micro-batches, endlessly from step `first` on."""
        for step in itertools.count(first):
            epoch, number = divmod(step - 1, self.steps_per_epoch)
            positions = np.arange(number * self.batch_size, (number + 1) * self.batch_size)
            seed = derive_seed("order", self.seed, epoch)
            order = feistel_permute(positions, self.n, seed).tolist()
            for j in plan.indices_for_rank(rank):
                begin = j * plan.micro_batch_size
                indices = order[begin : begin + plan.micro_batch_size]
                yield [(epoch, index) for index in indices]


class SampleSplit:
    """A split for evaluation: every sample once, or a fixed subset of the samples."""

    def __init__(
        self, dataset: Any, config: DatasetConfig, on_gpu: bool, limit: int | None = None
    ) -> None:
        """
        Args:
            dataset: The split.
            config: The settings of the dataset.
            on_gpu: True if the batches are copied to a GPU.
            limit: Number of samples to evaluate, the same ones every time. None evaluates all.
        """
        self.config = config
        self.on_gpu = on_gpu
        self._dataset = KeyedDataset(dataset, "evaluation")
        n = len(dataset)
        indices: Sequence[int] = range(n)
        if limit is not None and limit < n:
            part = feistel_permute(np.arange(limit), n, derive_seed("evaluation"))
            indices = sorted(part.tolist())
        self._batches = [
            indices[i : i + MAX_EVALUATION_BATCH]
            for i in range(0, len(indices), MAX_EVALUATION_BATCH)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, rank: int, world_size: int) -> Iterator[Any]:
        """Yield the batches of a rank. Batch number i belongs to rank i mod world size."""
        batches = []
        for batch in self._batches[rank::world_size]:
            batches.append([(0, index) for index in batch])
        return _loader(self._dataset, batches, self.config, self.on_gpu)
