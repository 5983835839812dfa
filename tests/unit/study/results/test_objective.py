"""The number by which jobs are ranked: their loss, or bits per byte."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mingpt_ddp.study.results.objective import BITS_PER_BYTE, LOSS, default_objective, loss_unit

TEXT = {"data.path": "a.txt", "data.tokenizer": "char", "data.truncate": 1.0}
BPE = {**TEXT, "data.tokenizer": "bpe", "data.vocab_size": 300}
STARTED = {"run.init_from": "outputs/other", "run.init_sha256": "1"}
OTHER_FILE = {"data.tokenizer": "/a/tokenizer.json", "data.vocab_size": None}


def ranked_by(*configs: dict[str, Any]):
    return default_objective(map(loss_unit, configs))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer.lr": 1},
        {"data.path": "b.txt"},  # in both texts, a token is a character
        {"data.truncate": 0.5},
        {"data.path": None, "data.dataset": "digits"},  # images have no tokens
        STARTED,  # once a run from weights has started, its tokenizer is known
    ],
    ids=str,
)
def test_jobs_of_one_tokenizer_are_ranked_by_loss(changes):
    assert ranked_by(TEXT, TEXT | changes) is LOSS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TEXT, {"data.tokenizer": "byte"}),
        (TEXT, {"data.tokenizer": "bpe"}),
        (TEXT, {"data.format": "tokens", "data.vocab_size": 65}),
        (TEXT, {"data.end_token": True}),
        (TEXT, {"run.init_from": "outputs/other"}),  # before the start, its tokenizer is unknown
        (BPE, {"data.tokenizer": "byte", "data.vocab_size": None}),
        (BPE, {"data.vocab_size": 301}),
        (BPE, {"data.path": "b.txt"}),
        (BPE, {"data.sha256": "0" * 64}),
        (BPE, {"data.truncate": 0.5}),
        (BPE, {"data.train_split": 0.5}),
        (BPE, {"data.sources": [["a.txt", 1.0], ["b.txt", 2.0]]}),
        (BPE, STARTED),
        (BPE, OTHER_FILE),
    ],
    ids=str,
)
def test_jobs_of_different_tokenizers_are_ranked_by_bits_per_byte(one, other):
    assert ranked_by(one, one) is LOSS
    assert ranked_by(one, one | other) is BITS_PER_BYTE
    assert ranked_by(one | other, one, {}) is BITS_PER_BYTE


def test_the_tokenizer_of_a_run_is_its_file(tmp_path):
    """Two runs with equal configurations may have found different files or texts. Two runs with
    different paths may have found the same.
    """
    for name, content in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    for config in (BPE, {**TEXT, "data.tokenizer": "tokenizer.json"}):
        a, b, c = (loss_unit(config, tmp_path / name) for name in "abc")
        assert default_objective([a, b]) is BITS_PER_BYTE and default_objective([a, c]) is LOSS
    both = loss_unit(BPE, tmp_path / "a"), loss_unit({**BPE, "data.path": "b.txt"}, tmp_path / "c")
    assert default_objective(both) is LOSS


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ({"val_bits_per_byte": 2.5}, 2.5),
        ({"bits_per_byte": 2}, 2.0),
        ({"val_loss": 1.0}, math.inf),
        ({"val_bits_per_byte": math.nan}, math.inf),
        ({"val_bits_per_byte": "1"}, math.inf),
    ],
    ids=str,
)
def test_the_value_in_a_result(result, value):
    assert BITS_PER_BYTE.value(result) == value
