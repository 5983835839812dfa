"""The order of the training text: what an epoch is, decided by (seed, epoch, position)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.data import dataloader
from mingpt_ddp.data.dataloader import (
    BatchPlan,
    TokenLoader,
    TokenSplit,
    TokenWindows,
    plan_batches,
)
from mingpt_ddp.data.dataset import EncodedText, TextDataset
from mingpt_ddp.errors import ConfigError, DataError

LENGTH, BLOCK, BATCH = 1003, 8, 12
# a character is its own position: windows are distinguishable
TOKENS = np.arange(LENGTH, dtype=np.uint16)
WINDOWS = (LENGTH - BLOCK) // BLOCK  # 124: 10 batches of 12, and 4 windows that do not fill another


def make(
    tokens=TOKENS, stride: int | None = None, batch: int = BATCH, seed: int = 1
) -> TokenLoader:
    return TokenLoader(tokens, BLOCK, stride, batch, seed)


def batch_of(loader: TokenLoader, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    (micro,) = loader.get_batch(step, BatchPlan(loader.batch_size, loader.batch_size, 1), 0)
    return micro.batch


def starts(loader: TokenLoader, epoch: int) -> list[int]:
    """Return where the windows of an epoch (from 0) start, in order."""
    first = epoch * loader.steps_per_epoch + 1
    return [
        int(x)
        for step in range(first, first + loader.steps_per_epoch)
        for x in batch_of(loader, step)[0][:, 0]
    ]


def test_y_is_x_shifted_by_one_character():
    loader = make()
    for step in (1, 5, 17):
        x, y = batch_of(loader, step)
        assert x.shape == y.shape == (BATCH, BLOCK)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x, x[:, :1] + torch.arange(BLOCK))
        assert torch.equal(y, x + 1)


def test_an_epoch_is_one_pass_over_the_text():
    """Adjacent windows from an offset, shuffled; the incomplete batch is dropped."""
    loader = make()
    assert loader.windows_per_epoch == WINDOWS == 124
    assert loader.steps_per_epoch == 10
    for epoch in range(5):
        order = starts(loader, epoch)
        offset = order[0] % BLOCK
        assert len(set(order)) == len(order) == 120
        assert set(order) <= {offset + i * BLOCK for i in range(WINDOWS)}
        assert order != sorted(order)


def test_every_window_is_trained_once_if_the_batch_size_divides_them():
    loader = make(batch=4)
    order = starts(loader, 0)
    offset = order[0] % BLOCK
    assert sorted(order) == [offset + i * BLOCK for i in range(WINDOWS)]
    assert max(order) + BLOCK < LENGTH  # the last y is still in the text


def test_the_offset_takes_every_value_below_the_block_size():
    loader = make()
    offsets = [starts(loader, epoch)[0] % BLOCK for epoch in range(80)]
    assert set(offsets) == set(range(BLOCK))


def test_every_epoch_and_seed_has_its_own_order():
    orders = [starts(make(seed=seed), epoch) for seed in (1, 2) for epoch in (0, 1, 2)]
    relative = {tuple(start // BLOCK for start in order) for order in orders}
    assert len(relative) == 6


def test_stride_1_gives_the_windows_of_mingpt():
    """All n - block_size overlapping windows, each once an epoch."""
    loader = make(TOKENS[:104], stride=1, batch=4)
    assert loader.windows_per_epoch == 96
    for epoch in range(3):
        assert sorted(starts(loader, epoch)) == list(range(96))
    assert starts(loader, 0) != starts(loader, 1)


@pytest.mark.parametrize("stride", [3, 20])
def test_any_other_stride(stride):
    loader = make(stride=stride, batch=1)
    order = starts(loader, 0)
    offset = min(order)
    assert 0 <= offset < stride
    assert sorted(order) == [offset + i * stride for i in range((LENGTH - BLOCK) // stride)]


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_the_shortest_text_that_fills_a_batch(stride):
    """Windows stay in the text for every offset that can be drawn."""
    step = stride or BLOCK
    enough = BLOCK + 2 * step
    for seed in range(30):
        x, y = batch_of(make(TOKENS[:enough], stride, batch=2, seed=seed), 1)
        assert int(y.max()) < enough
        assert len(set(x[:, 0].tolist())) == 2
    message = (
        "^data error: the training text has 1 windows of data.block_size=8, fewer than "
        "trainer.batch_size=2; "
        "use a longer text, a smaller batch or a smaller data.stride$"
    )
    with pytest.raises(DataError, match=message):
        make(TOKENS[: enough - 1], stride, batch=2)


def test_a_batch_does_not_depend_on_earlier_batches():
    steps = [1, 2, 10, 11, 12, 35, 100]
    fresh = {step: batch_of(make(), step)[0] for step in steps}
    loader = make()
    torch.manual_seed(5)
    for step in [*reversed(steps), 11, 1, 100, 10, 100]:
        assert torch.equal(batch_of(loader, step)[0], fresh[step])
    before = torch.get_rng_state()
    batch_of(loader, 1)
    assert torch.equal(torch.get_rng_state(), before), "the loader drew from the global generator"


@pytest.mark.parametrize("together", [1, 500, 1 << 16])
def test_a_batch_does_not_depend_on_batches_gathered_with_it(together, monkeypatch):
    """It depends on its step only, whatever was gathered with it or before it."""
    plan, other = BatchPlan(BATCH, 3, 2), BatchPlan(BATCH, 4, 3)
    alone = make()
    monkeypatch.setattr("mingpt_ddp.data.dataloader.GATHER_TOKENS", together)
    loader = make()
    for step in (*range(1, 24), 2):
        for cut, rank in ((plan, 0), (plan, 1), (other, 2)):
            for micro in loader.get_batch(step, cut, rank):
                x, y = batch_of(alone, step)
                rows = slice(
                    micro.index * cut.micro_batch_size, (micro.index + 1) * cut.micro_batch_size
                )
                assert torch.equal(micro.batch[0], x[rows])
                assert torch.equal(micro.batch[1], y[rows])
                assert all(part.is_contiguous() for part in micro.batch)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_windows_are_gathered_for_every_dtype_and_device(dtype, resident):
    """Up to the largest token of a character; the CPU is a device too."""
    largest = np.iinfo(dtype).max
    tokens = np.linspace(0, min(largest, 0x110000), 300).astype(dtype)
    starts = np.array([290, 0, 7, 7])
    found = TokenWindows(tokens, 9, torch.device("cpu"), resident).gather(starts)
    for part, first in zip(found, (starts, starts + 1), strict=True):
        assert part.tolist() == [tokens[start : start + 8].tolist() for start in first]
        assert part.dtype == torch.int64 and part.is_contiguous()


def test_a_text_becomes_resident_in_chunks(tmp_path, monkeypatch):
    """Memory-mapped as texts are; torch's memory is not counted, as that of a GPU."""
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
    """A resumed run continues the order of the version that started it."""
    loader = TokenLoader(TOKENS, BLOCK, None, 2, 1337)
    assert starts(loader, 0)[:6] == [122, 954, 298, 218, 578, 146]
    assert starts(loader, 3)[:6] == [614, 766, 174, 558, 54, 102]
    assert (loader.windows_per_epoch, loader.steps_per_epoch, loader.items_per_step) == (
        124,
        62,
        16,
    )


def test_steps_are_gathered_together_and_only_once(monkeypatch):
    """As many as GATHER_TOKENS has room for, and none of the next epoch."""
    gathered: list[int] = []
    permuted: list[list[int]] = []
    gather, permute = TokenWindows.gather, dataloader.feistel_permute

    def gather_counted(windows: TokenWindows, at: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        gathered.append(len(at))
        return gather(windows, at)

    def permute_counted(positions: np.ndarray, n: int, key: int) -> np.ndarray:
        permuted.append([int(positions[0]), len(positions)])
        return permute(positions, n, key)

    monkeypatch.setattr(TokenWindows, "gather", gather_counted)
    monkeypatch.setattr(dataloader, "feistel_permute", permute_counted)
    monkeypatch.setattr(dataloader, "GATHER_TOKENS", 3 * (6 * BLOCK))  # 3 steps of a rank
    monkeypatch.setattr(dataloader, "SHUFFLE_CHUNK", 40)
    loader, plan = make(), BatchPlan(BATCH, 3, 2)
    for step in range(1, 21):
        for _ in range(2):
            assert [micro.index for micro in loader.get_batch(step, plan, 1)] == [1, 3]
    assert gathered == [18, 18, 18, 6] * 2, "10 steps an epoch"
    assert permuted == [[0, 40], [36, 40], [72, 40], [108, 16]] * 2, (
        "the last is up to the 124 windows"
    )
    monkeypatch.setattr(dataloader, "SHUFFLE_CHUNK", 36)
    loader = make()
    for rank in (0, 1):
        loader.get_batch(1, plan, rank)
    assert permuted[8:] == [[0, 36]]
    monkeypatch.setattr(dataloader, "GATHER_TOKENS", 1)
    loader.get_batch(9, plan, 1)
    assert gathered[-1] == 6, "at least one step"


@pytest.mark.parametrize("resident", [True, False])
def test_windows_are_gathered_on_their_device(resident):
    windows = TokenWindows(TOKENS, BLOCK + 1, torch.device("meta"), resident)
    x, y = windows.gather(np.arange(5))
    assert (x.device.type, x.shape, y.device.type, y.shape) == (
        "meta",
        (5, BLOCK),
        "meta",
        (5, BLOCK),
    )


def test_the_batches_are_on_the_device_of_the_loader():
    loader = TokenLoader(TOKENS, BLOCK, None, BATCH, 1, torch.device("meta"))
    assert batch_of(loader, 1)[0].device.type == "meta"
    assert batch_of(make(), 1)[0].device.type == "cpu"


def test_an_evaluation_reads_batches_of_windows_and_the_rest(monkeypatch):
    """Of 103 tokens, 12 windows of 8 and one of 6; batch i is for rank i mod world size."""
    monkeypatch.setattr(dataloader, "TOKENS_PER_BATCH", 5 * BLOCK)
    split = TokenSplit(TOKENS[:103], BLOCK, torch.device("cpu"))
    assert len(split) == 4
    found = [list(split.batches(rank, 3)) for rank in range(3)]
    assert [[tuple(x.shape) for x, _ in batches] for batches in found] == [
        [(5, 8), (1, 6)],
        [(5, 8)],
        [(2, 8)],
    ]
    order = [found[0][0], found[1][0], found[2][0], found[0][1]]
    assert torch.cat([x.flatten() for x, _ in order]).tolist() == list(range(102))
    assert all(torch.equal(y, x + 1) for x, y in order)


def test_a_sampled_evaluation_never_changes(monkeypatch):
    """Results of different versions compare."""
    split = TokenSplit(TOKENS, BLOCK, torch.device("meta"), windows=5)
    ((x, _),) = split.batches(0, 1)
    assert (x.device.type, tuple(x.shape)) == ("meta", (5, BLOCK))
    ((x, _),) = TokenSplit(TOKENS, BLOCK, torch.device("cpu"), windows=5).batches(0, 1)
    assert x[:, 0].tolist() == [208, 400, 680, 912, 968]
    monkeypatch.setattr(dataloader, "TOKENS_PER_BATCH", 1)
    assert len(TokenSplit(TOKENS, BLOCK, torch.device("cpu"), windows=5)) == 5


def plan_of(
    trainer: TrainerConfig, world_size: int, kept: int | None = None, sync: bool = False
) -> BatchPlan:
    config: Any = SimpleNamespace(trainer=trainer, ddp=SimpleNamespace(sync_batchnorm=sync))
    return plan_batches(config, world_size, kept)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro", [1, None], ids=["micro=1", "micro=null"])
def test_the_batch_is_the_same_on_any_number_of_ranks(trainer, world_size, micro):
    """The micro-batches of all ranks, put together by their numbers, are the batch of one rank."""
    plan = plan_of(replace(trainer, micro_batch_size=micro), world_size)
    for step in (1, 10, 11):
        micros = [m for rank in range(world_size) for m in make().get_batch(step, plan, rank)]
        micros.sort(key=lambda m: m.index)
        assert [m.index for m in micros] == list(range(plan.n_micro))
        x, y = batch_of(make(), step)
        assert torch.equal(torch.cat([m.batch[0] for m in micros]), x)
        assert torch.equal(torch.cat([m.batch[1] for m in micros]), y)


def test_no_window_crosses_the_split(tmp_path):
    """The last character that is trained on, as x or as y, is the last one before the split."""
    TOKENS.tofile(tmp_path / "tokens.bin")
    encoded = EncodedText(
        str(tmp_path), "", LENGTH, {"vocabulary": "".join(map(chr, range(LENGTH)))}, "uint16", ""
    )
    config = DataConfig(
        name="text",
        path="text.txt",
        sha256=None,
        block_size=BLOCK,
        stride=1,
        train_split=0.7,
        truncate=1.0,
        cache_dir="cache",
    )
    data = TextDataset(encoded, config)
    loader = make(data.train, stride=1, batch=2)
    seen = [int(batch_of(loader, step)[1].max()) for step in range(1, loader.steps_per_epoch + 1)]
    boundary = int(LENGTH * 0.7)
    assert max(seen) == boundary - 1
    assert int(data.val[0]) == boundary


# Micro-batches


@pytest.fixture
def trainer() -> TrainerConfig:
    return TrainerConfig(
        max_epochs=1,
        max_steps=None,
        batch_size=BATCH,
        micro_batch_size=None,
        device="cpu",
        precision="fp32",
        compile=False,
        grad_norm_clip=None,
        log_every=10,
        eval_every=None,
        sample_every=None,
        on_nonfinite="stop",
        spike_factor=None,
        deterministic=False,
    )


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "expected"),
    [
        (12, None, 1, 12),
        (12, None, 2, 6),
        (12, None, 3, 4),
        (12, None, 4, 3),
        (12, None, 5, 2),
        (12, None, 6, 2),
        (12, None, 7, 1),
        (12, None, 12, 1),
        (7, None, 2, 1),
        (64, None, 3, 16),
        (12, 4, 1, 4),
        (12, 4, 2, 4),
        (12, 4, 3, 4),
        (12, 1, 7, 1),
    ],
)
def test_the_micro_batch_size(trainer, batch, micro, world_size, expected):
    """The configured one, else the largest divisor of the batch that is not above batch / world."""
    plan = plan_of(replace(trainer, batch_size=batch, micro_batch_size=micro), world_size)
    assert (plan.micro_batch_size, plan.n_micro) == (expected, batch // expected)


@pytest.mark.parametrize("world_size", [1, 3, 4, 7, 12])
def test_every_micro_batch_runs_on_one_rank(trainer, world_size):
    """Number j on rank j mod world size, and no rank without work."""
    plan = plan_of(trainer, world_size)
    of_rank = [list(plan.indices_for_rank(rank)) for rank in range(world_size)]
    assert all(
        numbers and all(j % world_size == rank for j in numbers)
        for rank, numbers in enumerate(of_rank)
    )
    assert sorted(j for numbers in of_rank for j in numbers) == list(range(plan.n_micro))


def test_the_snapshot_keeps_the_micro_batch_size(trainer):
    """A run started on 2 ranks resumes with the same micro-batches on 1.

    A configured size has precedence.
    """
    assert plan_of(trainer, 1, kept=6).micro_batch_size == 6
    assert plan_of(replace(trainer, micro_batch_size=3), 1, kept=6).micro_batch_size == 3


@pytest.mark.parametrize(("kept", "world_size", "divisor"), [(24, 1, 12), (8, 1, 12), (24, 3, 4)])
def test_another_batch_than_the_snapshot_s_micro_batches_make(trainer, kept, world_size, divisor):
    message = f"trainer.batch_size=12 is not a multiple of {kept}, the micro-batch size of the "
    with pytest.raises(ConfigError, match=f"{message}snapshot; set .*micro_batch_size={divisor}$"):
        plan_of(trainer, world_size, kept)
    assert plan_of(replace(trainer, micro_batch_size=divisor), world_size, kept).n_micro >= 1


@pytest.mark.parametrize(
    ("micro", "kept", "world_size", "most"),
    [(4, None, 4, 3), (12, None, 2, 1), (None, 6, 3, 2), (None, None, 13, 12)],
)
def test_more_ranks_than_micro_batches_names_valid_world_sizes(
    trainer, micro, kept, world_size, most
):
    config = replace(trainer, micro_batch_size=micro)
    size = micro or kept or 1
    message = (
        f"trainer.batch_size=12 in micro-batches of {size} occupies {most} of {world_size} ranks; "
        f"use at most {most}, "
        "or a new run with a larger batch or smaller micro-batches"
    )
    with pytest.raises(ConfigError, match=f"^config error: {message}$"):
        plan_of(config, world_size, kept)
    for fewer in range(1, most + 1):
        assert plan_of(config, fewer, kept).n_micro >= fewer


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_synchronized_batch_normalization_takes_one_micro_batch_per_rank(trainer, world_size):
    """Whatever a snapshot has: the statistics are always those of the whole batch."""
    assert plan_of(trainer, world_size, kept=6, sync=True).indices_for_rank(0) == range(
        0, world_size, world_size
    )


@pytest.mark.parametrize(("micro", "world_size"), [(None, 5), (None, 7), (3, 2)])
def test_synchronized_batch_normalization_refuses_unequal_ranks(trainer, micro, world_size):
    message = (
        "ddp.sync_batchnorm=true needs one micro-batch per rank: trainer.batch_size=12 a "
        "multiple of the "
        f"{world_size} ranks, and trainer.micro_batch_size=null"
    )
    with pytest.raises(ConfigError, match=f"^config error: {message}$"):
        plan_of(replace(trainer, micro_batch_size=micro), world_size, sync=True)


def test_cuda_graphs_take_one_micro_batch(trainer):
    graphs = replace(trainer, compile="cuda_graphs")
    assert plan_of(graphs, 1).n_micro == 1
    message = (
        "trainer.compile=cuda_graphs needs one micro-batch, trainer.batch_size=12 makes 2 of "
        "6 sequences; "
        "use trainer.compile=true"
    )
    for world_size in (1, 2):
        with pytest.raises(ConfigError, match=f"^config error: {message}$"):
            plan_of(replace(graphs, micro_batch_size=6), world_size)
