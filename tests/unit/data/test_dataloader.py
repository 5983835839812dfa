"""The order of the training windows depends only on the seed, the epoch and the position."""

from __future__ import annotations

import tracemalloc
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mingpt_ddp.data import dataloader
from mingpt_ddp.data.dataloader import (
    BatchPlan,
    TokenLoader,
    TokenSplit,
    TokenWindows,
    plan_batches,
)
from mingpt_ddp.errors import ConfigError, DataError

LENGTH, BLOCK, BATCH = 1003, 8, 12
# Each token is its own position, so that windows can be told apart.
TOKENS = np.arange(LENGTH, dtype=np.uint16)
WINDOWS = (LENGTH - BLOCK) // BLOCK  # 124: 10 batches of 12, and 4 left over


def make(
    tokens=TOKENS, stride: int | None = None, batch: int = BATCH, seed: int = 1
) -> TokenLoader:
    return TokenLoader(tokens, BLOCK, stride, batch, seed)


def batch_of(loader: TokenLoader, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    (micro,) = loader.get_batch(step, BatchPlan(loader.batch_size, loader.batch_size, 1), 0)
    return micro.batch


def starts(loader: TokenLoader, epoch: int) -> list[int]:
    """Return the start positions of an epoch's windows, in order. Epochs count from 0."""
    first = epoch * loader.steps_per_epoch + 1
    return [
        int(x)
        for step in range(first, first + loader.steps_per_epoch)
        for x in batch_of(loader, step)[0][:, 0]
    ]


@pytest.mark.parametrize("stride", [None, 1, 3, 20])
def test_an_epoch_is_one_pass_over_the_text(stride):
    """Each window comes once per epoch. Each epoch has its own offset and order.

    The targets y are x, shifted by one token. With stride 1, the windows are those of minGPT.
    """
    step = stride or BLOCK
    n = (LENGTH - BLOCK) // step
    loader = make(stride=stride, batch=1)
    assert loader.windows_per_epoch == loader.steps_per_epoch == n
    orders = [starts(loader, epoch) for epoch in range(3)]
    for order in orders:
        assert 0 <= min(order) < step
        assert sorted(order) == [min(order) + i * step for i in range(n)] != order
    assert orders[0] != orders[1] != orders[2]
    x, y = batch_of(make(stride=stride), 2)
    assert x.shape == y.shape == (BATCH, BLOCK) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x, x[:, :1] + torch.arange(BLOCK)) and torch.equal(y, x + 1)


def test_the_incomplete_batch_of_an_epoch_is_dropped():
    loader = make()
    assert (loader.windows_per_epoch, loader.steps_per_epoch) == (WINDOWS, 10)
    assert all(len({*starts(loader, epoch)}) == 120 for epoch in range(5))


def test_every_epoch_and_seed_has_its_own_offset_and_order():
    orders = [starts(make(seed=seed), epoch) for seed in (1, 2) for epoch in range(40)]
    assert {order[0] % BLOCK for order in orders[:40]} == {*range(BLOCK)}
    assert len({tuple(start // BLOCK for start in order) for order in orders}) == 80


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_the_shortest_text_that_fills_a_batch(stride):
    """No offset that can be drawn moves a window beyond the end of the text."""
    enough = BLOCK + 2 * (stride or BLOCK)
    for seed in range(30):
        x, y = batch_of(make(TOKENS[:enough], stride, batch=2, seed=seed), 1)
        assert int(y.max()) < enough
        assert len(set(x[:, 0].tolist())) == 2
    message = (
        "^data error: the training text has 1 windows of data.block_size=8, fewer than "
        "trainer.batch_size=2; use a longer text, a smaller batch or a smaller data.stride$"
    )
    with pytest.raises(DataError, match=message):
        make(TOKENS[: enough - 1], stride, batch=2)


@pytest.mark.parametrize("together", [1, 500, 1 << 16])
def test_a_batch_depends_only_on_its_step(together, monkeypatch):
    """Earlier batches, batches gathered together, ranks and the global generator do not matter.

    The micro-batches of all ranks, ordered by their index, make up the batch of a single rank.
    """
    expected = {step: batch_of(make(), step) for step in range(1, 24)}
    monkeypatch.setattr(dataloader, "GATHER_TOKENS", together)
    monkeypatch.setattr(dataloader, "SHUFFLE_CHUNK", 40)
    before = torch.get_rng_state()
    loader = make()
    for micro_size, world_size in ((12, 1), (3, 2), (4, 3), (3, 4), (1, 7)):
        plan = BatchPlan(BATCH, micro_size, world_size)
        for step in (*range(1, 24), 2, 2, 23):
            micros = [m for rank in range(world_size) for m in loader.get_batch(step, plan, rank)]
            micros.sort(key=lambda micro: micro.index)
            assert [micro.index for micro in micros] == [*range(plan.n_micro)]
            assert all(part.is_contiguous() for micro in micros for part in micro.batch)
            for i, whole in enumerate(expected[step]):
                assert torch.equal(torch.cat([micro.batch[i] for micro in micros]), whole)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_windows_are_gathered_for_every_dtype_and_device(dtype, resident):
    """Tokens go up to the largest code point or the largest value of the dtype."""
    largest = np.iinfo(dtype).max
    tokens = np.linspace(0, min(largest, 0x110000), 300).astype(dtype)
    begins = np.array([290, 0, 7, 7])
    found = TokenWindows(tokens, 9, torch.device("cpu"), resident).gather(begins)
    for part, first in zip(found, (begins, begins + 1), strict=True):
        assert part.tolist() == [tokens[begin : begin + 8].tolist() for begin in first]
        assert part.dtype == torch.int64 and part.is_contiguous()
    there = TokenWindows(tokens, 9, torch.device("meta"), resident).gather(begins)
    assert {(part.device.type, part.shape) for part in there} == {("meta", (4, 8))}


def test_a_text_becomes_resident_in_chunks(tmp_path, monkeypatch):
    """The text is memory-mapped. tracemalloc does not see torch's memory, which may be on a GPU."""
    monkeypatch.setattr(dataloader, "RESIDENT_CHUNK", 10_000)
    text = np.random.default_rng(0).integers(0, 1 << 16, 95_003).astype(np.uint16)
    np.save(tmp_path / "text.npy", text)
    tokens = np.load(tmp_path / "text.npy", mmap_mode="r")
    tracemalloc.start()
    windows = TokenWindows(tokens, 9, torch.device("cpu"), resident=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000, "a chunk takes 20 kB, the text 190 kB"
    x, _ = windows.gather(np.arange(0, len(text) - 8, 8))
    assert x.flatten().tolist() == text[: x.numel()].tolist()


def test_the_order_of_a_seed_never_changes():
    """A run that is resumed by a later version must continue in the same order."""
    loader = TokenLoader(TOKENS, BLOCK, None, 2, 1337)
    assert starts(loader, 0)[:6] == [122, 954, 298, 218, 578, 146]
    assert starts(loader, 3)[:6] == [614, 766, 174, 558, 54, 102]
    assert (loader.steps_per_epoch, loader.items_per_step) == (62, 16)
    there = TokenLoader(TOKENS, BLOCK, None, BATCH, 1, torch.device("meta"))
    assert batch_of(there, 1)[0].device.type == "meta"


def test_an_evaluation_reads_batches_of_windows_and_the_rest(monkeypatch):
    """103 tokens make 12 windows of 8 and one of 6. Batch i goes to rank i mod world size."""
    monkeypatch.setattr(dataloader, "EVALUATION_BATCH_TOKENS", 5 * BLOCK)
    split = TokenSplit(TOKENS[:103], BLOCK, torch.device("cpu"))
    assert len(split) == 4
    found = [list(split.batches(rank, 3)) for rank in range(3)]
    shapes = [[tuple(x.shape) for x, _ in batches] for batches in found]
    assert shapes == [[(5, 8), (1, 6)], [(5, 8)], [(2, 8)]]
    order = [found[0][0], found[1][0], found[2][0], found[0][1]]
    assert torch.cat([x.flatten() for x, _ in order]).tolist() == list(range(102))
    assert all(torch.equal(y, x + 1) for x, y in order)


def test_a_sampled_evaluation_never_changes(monkeypatch):
    """Results of different versions must be comparable."""
    split = TokenSplit(TOKENS, BLOCK, torch.device("meta"), windows=5)
    ((x, _),) = split.batches(0, 1)
    assert (x.device.type, tuple(x.shape)) == ("meta", (5, BLOCK))
    ((x, _),) = TokenSplit(TOKENS, BLOCK, torch.device("cpu"), windows=5).batches(0, 1)
    assert x[:, 0].tolist() == [208, 400, 680, 912, 968]
    monkeypatch.setattr(dataloader, "EVALUATION_BATCH_TOKENS", 1)
    assert len(TokenSplit(TOKENS, BLOCK, torch.device("cpu"), windows=5)) == 5


# Micro-batches


def plan_of(
    batch: int,
    micro: int | None,
    world_size: int,
    kept: int | None = None,
    sync_batchnorm: bool = False,
) -> BatchPlan:
    trainer = SimpleNamespace(batch_size=batch, micro_batch_size=micro, compile=False)
    ddp = SimpleNamespace(sync_batchnorm=sync_batchnorm)
    config: Any = SimpleNamespace(trainer=trainer, ddp=ddp)
    return plan_batches(config, world_size, kept)


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "kept", "expected"),
    [
        # None: the largest divisor of the batch size that is at most batch / world size
        *((12, None, world, None, size) for world, size in enumerate([12, 6, 4, 3, 2, 2, 1], 1)),
        (12, None, 12, None, 1),
        (7, None, 2, None, 1),
        (64, None, 3, None, 16),
        *((12, 4, world, None, 4) for world in (1, 2, 3)),
        (12, 1, 7, None, 1),
        # A run that was started on 2 ranks keeps its micro-batch size on 1 rank. A given size wins.
        (12, None, 1, 6, 6),
        (12, 3, 1, 6, 3),
    ],
)
def test_the_micro_batch_size(batch, micro, world_size, kept, expected):
    """Micro-batch j runs on rank j mod world size, and every rank has at least one."""
    plan = plan_of(batch, micro, world_size, kept)
    assert (plan.micro_batch_size, plan.n_micro) == (expected, batch // expected)
    of_rank = [[*plan.indices_for_rank(rank)] for rank in range(world_size)]
    assert all(j % world_size == rank for rank, js in enumerate(of_rank) for j in js)
    assert all(of_rank) and sorted(chain(*of_rank)) == [*range(plan.n_micro)]


@pytest.mark.parametrize(("kept", "world_size", "divisor"), [(24, 1, 12), (8, 1, 12), (24, 3, 4)])
def test_a_batch_size_that_the_recorded_micro_batches_do_not_divide(kept, world_size, divisor):
    message = f"trainer.batch_size=12 is not a multiple of {kept}, the micro-batch size of the "
    with pytest.raises(ConfigError, match=f"{message}snapshot; set .*micro_batch_size={divisor}$"):
        plan_of(12, None, world_size, kept)
    assert plan_of(12, divisor, world_size, kept).n_micro >= 1


@pytest.mark.parametrize(
    ("micro", "kept", "world_size", "most"),
    [(4, None, 4, 3), (12, None, 2, 1), (None, 6, 3, 2), (None, None, 13, 12)],
)
def test_more_ranks_than_micro_batches_names_valid_world_sizes(micro, kept, world_size, most):
    message = (
        f"trainer.batch_size=12 in micro-batches of {micro or kept or 1} occupies {most} of "
        f"{world_size} ranks; use at most {most} ranks?, or start a new run with a larger batch or "
        "smaller micro-batches"
    )
    with pytest.raises(ConfigError, match=f"^config error: {message}$"):
        plan_of(12, micro, world_size, kept)
    assert all(plan_of(12, micro, fewer, kept).n_micro >= fewer for fewer in range(1, most + 1))


def test_synchronized_batch_normalization_takes_one_micro_batch_per_rank():
    """Its statistics must be those of the whole batch, whatever size a snapshot has recorded."""
    for world_size in (1, 2, 3):
        plan = plan_of(12, None, world_size, kept=6, sync_batchnorm=True)
        assert plan.micro_batch_size * world_size == 12
    for micro, world_size in ((None, 5), (None, 7), (3, 2)):
        with pytest.raises(
            ConfigError, match=f"a multiple of the {world_size} ranks, and set trainer"
        ):
            plan_of(12, micro, world_size, sync_batchnorm=True)
