"""Windows are drawn from several texts by weight.

The shares are exact, and a text repeats no window before it has shown all of them.
"""

from __future__ import annotations

import numpy as np
import pytest

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.weighted import WeightedLoader
from mingpt_ddp.errors import DataError

T, BATCH = 4, 6
SIZES = [201, 401, 81]  # 49, 99 and 19 windows: (size - T) // T
TOKENS = np.arange(sum(SIZES), dtype=np.uint16)
BEGINS = np.array([0, 201, 602])
PLAN = BatchPlan(BATCH, BATCH, 1)


def loader(
    weights=(1.0, 1.0, 2.0), batch: int = BATCH, sizes=SIZES, seed: int = 1
) -> WeightedLoader:
    sources = [(f"{i}.txt", weight) for i, weight in enumerate(weights)]
    config = DataConfig(path="unused", sources=sources, block_size=T)
    return WeightedLoader(TOKENS, list(sizes), config, batch, seed)


def starts(of: WeightedLoader, epoch: int) -> np.ndarray:
    """Return the start positions of an epoch's windows: each token is its own position."""
    plan = BatchPlan(of.batch_size, of.batch_size, 1)
    steps = range(epoch * of.steps_per_epoch + 1, (epoch + 1) * of.steps_per_epoch + 1)
    micros = [of.get_batch(step, plan, 0)[0] for step in steps]
    return np.concatenate([micro.batch[0][:, 0].numpy() for micro in micros])


def test_each_text_gives_its_share_and_windows_stay_inside():
    found = starts(loader(batch=1), 0)
    text = np.searchsorted(BEGINS, found, side="right") - 1
    assert np.abs(np.bincount(text) - 167 * np.array([0.25, 0.25, 0.5])).max() <= 1
    assert np.all(found + T < (BEGINS + SIZES)[text])


def test_all_windows_of_a_text_come_before_any_is_repeated():
    whole = loader(batch=1)
    per_epoch = [[s for s in starts(whole, epoch) if s < SIZES[0]] for epoch in range(12)]
    assert len({*per_epoch[0]}) == len(per_epoch[0]) > 40
    # The offset differs between epochs.
    assert len({min(part) % T for part in per_epoch}) > 1
    counts = np.bincount([(s - min(part) % T) // T for part in per_epoch for s in part])
    assert max(counts) - min(counts) <= 2


def test_batches_are_a_function_of_the_step():
    one, other_seed = loader(), loader(seed=2)
    whole = {step: one.get_batch(step, PLAN, 0)[0].batch[0].tolist() for step in range(1, 70)}
    for step in (69, 1, 40, 28):
        halves = [loader().get_batch(step, BatchPlan(BATCH, 3, 2), rank)[0] for rank in (0, 1)]
        assert [row for half in halves for row in half.batch[0].tolist()] == whole[step]
    others = {step: other_seed.get_batch(step, PLAN, 0)[0].batch[0].tolist() for step in whole}
    assert whole != others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sizes": [201, 401, 7]},
            "the training part of 2.txt in data.sources is shorter than one ",
        ),
        ({"batch": 168}, "the training text has 167 windows"),
        (
            {"weights": (1e-300, 1.0, 1.0)},
            "0.txt in .* has less than one window per epoch; raise i",
        ),
    ],
)
def test_sources_that_give_no_windows_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        loader(**changes)
