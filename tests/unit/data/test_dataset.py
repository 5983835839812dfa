"""The split into training and validation tokens."""

from __future__ import annotations

import pytest

from mingpt_ddp.data.dataset import TextDataset
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import prepare

TEXT = "To be, or not to be: that is the question. 123 äöß € 漢字 😀\n" * 20


@pytest.mark.parametrize(("truncate", "split"), [(1.0, 0.75), (0.5, 0.8)])
def test_the_split_is_contiguous_and_without_overlap(truncate, split, settings):
    """data.truncate uses the first part of the text."""
    config = settings(TEXT, truncate=truncate, train_split=split)
    data = TextDataset(prepare(config), config)
    used = TEXT[: int(len(TEXT) * truncate)]
    boundary = int(len(used) * split)
    assert data.tokenizer.decode(data.train.tolist()) == used[:boundary]
    assert data.tokenizer.decode(data.val.tolist()) == used[boundary:]
    assert data.tokenizer.vocab_size == len(set(TEXT))


@pytest.mark.parametrize(
    ("length", "split", "message"),
    [
        (100, 0.08, "one window needs data.block_size [+] 1 = 9"),
        (100, 0.995, "validation text has 1 tokens"),
        (11, 0.82, None),  # the shortest splits that work: 9 tokens and 2 tokens
    ],
)
def test_splits_that_are_too_short_are_refused(settings, length, split, message):
    config = settings(("ab" * length)[:length], train_split=split)
    data = TextDataset(prepare(config), config)
    if message is None:
        data.check_lengths(config.block_size)
        assert (len(data.train), len(data.val)) == (9, 2)
    else:
        with pytest.raises(DataError, match=message):
            data.check_lengths(config.block_size)
