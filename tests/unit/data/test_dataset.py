"""The split into training and validation tokens."""

from __future__ import annotations

import pytest

from mingpt_ddp.data.dataset import TextDataset
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import prepare

LINE = "To be, or not to be: that is the question. 123 äöß € 漢字 😀\n"


def test_the_split_is_contiguous_and_without_overlap(settings):
    text = LINE * 20
    config = settings(text, train_split=0.75)
    data = TextDataset(prepare(config), config)
    boundary = int(len(text) * 0.75)
    decode = data.tokenizer.decode
    assert decode(data.train.tolist()) == text[:boundary]
    assert decode(data.val.tolist()) == text[boundary:]
    assert data.tokenizer.vocab_size == len(set(text))


def test_truncate_uses_the_first_part_of_the_text(settings):
    text = LINE * 20
    config = settings(text, truncate=0.5, train_split=0.8)
    data = TextDataset(prepare(config), config)
    used = text[: len(text) // 2]
    decode = data.tokenizer.decode
    assert decode(data.train.tolist()) + decode(data.val.tolist()) == used
    assert len(data.train) == int(len(used) * 0.8)


@pytest.mark.parametrize(
    ("length", "split", "message"),
    [
        (100, 0.08, "one window needs data.block_size [+] 1 = 9"),
        (100, 0.995, "validation text has 1 tokens"),
    ],
)
def test_parts_that_are_too_short_are_refused(settings, length, split, message):
    config = settings("ab" * (length // 2), train_split=split)
    data = TextDataset(prepare(config), config)
    with pytest.raises(DataError, match=message):
        data.check_lengths(config.block_size)


def test_the_shortest_parts_that_work(settings):
    """One window of 8 + 1 characters for training, two for validation."""
    config = settings("ab" * 5 + "a", train_split=0.82)
    data = TextDataset(prepare(config), config)
    data.check_lengths(config.block_size)
    assert (len(data.train), len(data.val)) == (9, 2)
