"""An ensemble averages probabilities, of models that predict the same items."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.inference.ensemble import Ensemble, why_not_averaged


def test_the_mean_of_probabilities():
    logits = torch.tensor([[[2.0, 0.0, -1.0]], [[0.0, 1.0, 0.5]], [[-40.0, 3.0, 90.0]]])
    models = [nn.Linear(1, 3) for _ in logits]
    for model, row in zip(models, logits, strict=True):
        nn.init.zeros_(model.weight)
        model.bias = nn.Parameter(row[0])
    found = Ensemble(models)(torch.zeros(4, 1))
    expected = logits[:, 0].softmax(dim=-1).mean(dim=0)
    torch.testing.assert_close(found.exp(), expected.expand(4, 3))


def state(**changes: Any) -> dict[str, Any]:
    return {
        "vocabulary": "abc",
        "text": {"sha256": "1"},
        "config": {"data": {"block_size": 8}},
        **changes,
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (state(vocabulary="abd"), "another vocabulary"),
        (state(config={"data": {"block_size": 9}}), "another block_size"),
        (
            state(vocabulary="abd", config={"data": {"block_size": 9}}),
            "another vocabulary and another block_size",
        ),
        (
            {
                **{key: value for key, value in state().items() if key != "vocabulary"},
                "tokenizer": {"type": "byte"},
            },
            "another vocabulary",
        ),
    ],
)
def test_models_of_other_outputs_have_no_average(other, message):
    reason = f"b cannot be averaged with a: it has {message}"
    assert why_not_averaged({"a": state(), "b": other}, ["vocabulary", "text"]) == reason
    assert (
        why_not_averaged({"a": state(), "b": other, "c": other}, ["vocabulary", "text"]) == reason
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            state(text={"sha256": "2"}),
            "b has other data than a; measure it alone, or all on a text: data.path=",
        ),
        (state(text={"sha256": "2"}, vocabulary="abd"), "b has other data than a"),
        ({"vocabulary": "abc"}, "the snapshot of b has an invalid state"),
        ("no state", "the snapshot of b has an invalid state"),
    ],
)
def test_other_runs_are_refused(other, message):
    with pytest.raises(SnapshotError, match=message):
        why_not_averaged({"a": state(), "b": other}, ["vocabulary", "text"])
    assert why_not_averaged({"a": state(), "c": state()}, ["vocabulary", "text"]) is None


def test_one_text_in_tokens_of_two_tokenizers():
    """Its length differs; its SHA-256 is that of the bytes."""
    one, other = (
        {"tokenizer": {"json": name}, "text": {"sha256": "1", "length": len(name)}}
        for name in ("a", "bb")
    )
    assert "another tokenizer" in str(
        why_not_averaged({"a": state(**one), "b": state(**other)}, ["tokenizer", "text"])
    )
