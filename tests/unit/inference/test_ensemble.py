"""An ensemble averages probabilities, of models that predict the same items."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.inference.ensemble import Ensemble, check_same_outputs


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
    return {"vocabulary": "abc", "text": {"sha256": "1"}, "config": {"data": {"block_size": 8}}, **changes}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (state(vocabulary="abd"), "b cannot be averaged with a: it has another vocabulary; give runs"),
        (state(text={"sha256": "2"}), "b cannot be averaged with a: it has another text; give runs"),
        (state(config={"data": {"block_size": 9}}), "another block_size;"),
        (
            {**{key: value for key, value in state().items() if key != "vocabulary"}, "tokenizer": {"type": "byte"}},
            "b cannot be averaged with a: it has another vocabulary; give runs",
        ),
        ({"vocabulary": "abc"}, "the snapshot of b has an invalid state"),
        ("no state", "the snapshot of b has an invalid state"),
    ],
)
def test_other_runs_are_refused(other, message):
    with pytest.raises(SnapshotError, match=message):
        check_same_outputs({"a": state(), "b": other}, ["vocabulary", "text"])
    check_same_outputs({"a": state(), "c": state()}, ["vocabulary", "text"])
