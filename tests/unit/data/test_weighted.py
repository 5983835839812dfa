"""Windows of several texts by weight: exact shares, all seen before any is repeated."""

from __future__ import annotations

import numpy as np
import pytest

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.weighted import WeightedLoader
from mingpt_ddp.errors import ConfigError, DataError

T, BATCH = 4, 6
SIZES = [201, 401, 81]  # 49, 99 and 19 windows: (size - T) // T
TOKENS = np.arange(sum(SIZES), dtype=np.uint16)
BEGINS = np.array([0, 201, 602])


def loader(
    weights=(1.0, 1.0, 2.0), batch: int = BATCH, sizes=SIZES, seed: int = 1
) -> WeightedLoader:
    sources = [(f"{i}.txt", weight) for i, weight in enumerate(weights)]
    config = DataConfig(path="unused", sources=sources, block_size=T)
    return WeightedLoader(TOKENS, list(sizes), config, batch, seed)


def starts(of: WeightedLoader, epochs: range) -> np.ndarray:
    return np.concatenate([of._window_starts(e, 0, of.windows_per_epoch) for e in epochs])


def test_each_text_gives_its_share_and_windows_stay_inside():
    found = starts(loader(), range(1))
    text = np.searchsorted(BEGINS, found, side="right") - 1
    assert np.abs(np.bincount(text) - 167 * np.array([0.25, 0.25, 0.5])).max() <= 1
    assert np.all(found + T < (BEGINS + SIZES)[text])


def test_all_windows_of_a_text_come_before_any_again():
    own = [start for start in starts(loader(), range(12)) if start < SIZES[0]]
    per_epoch = [[s for s in starts(loader(), range(e, e + 1)) if s < SIZES[0]] for e in range(12)]
    # the offset differs by epoch
    windows = [(s - min(part) % T) // T for part in per_epoch for s in part]
    assert len(own) == len(windows) > 10 * 40
    order = np.array(windows)
    first = {w for part in per_epoch[:1] for w in part}
    assert len(first) == len(per_epoch[0])
    assert sorted(np.bincount(order))[-1] - sorted(np.bincount(order))[0] <= 2


def test_batches_are_a_function_of_the_step():
    one, plan = loader(), BatchPlan(BATCH, 3, 1)
    whole = {
        step: [m.batch[0].tolist() for m in one.get_batch(step, plan, 0)] for step in range(1, 70)
    }
    for step in (69, 1, 40, 28):
        halves = [
            loader().get_batch(step, BatchPlan(BATCH, 3, 2), rank)[0].batch[0].tolist()
            for rank in (0, 1)
        ]
        assert halves == whole[step]
    assert whole != {
        s: [m.batch[0].tolist() for m in loader(seed=2).get_batch(s, plan, 0)] for s in range(1, 70)
    }


def test_texts_that_are_too_short():
    with pytest.raises(
        DataError, match=r"the training part of 2.txt in data.sources is shorter than one window"
    ):
        loader(sizes=[201, 401, 7])
    with pytest.raises(DataError, match="the training text has 167 windows"):
        loader(batch=168)


def test_a_weight_too_small_for_a_window():
    with pytest.raises(
        DataError,
        match=r"0.txt in data.sources has less than one window per epoch; raise its weight",
    ):
        loader(weights=(1e-300, 1.0, 1.0))


def test_weights_without_a_finite_sum():
    with pytest.raises(ConfigError, match=r"the weights of data.sources have no finite sum"):
        loader(weights=(1e308, 1e308, 1.0))
