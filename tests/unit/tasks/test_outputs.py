"""The values that `Task.loss` may return, and how they are averaged."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingpt_ddp.errors import CodeError
from mingpt_ddp.metrics.meters import means
from mingpt_ddp.tasks.outputs import Outputs, check_outputs, outputs_of

LOSS = torch.tensor(2.0)


class Sparse(nn.Module):
    """A model that measures its forward pass."""

    def step_metrics(self) -> dict[str, Any]:
        return {"zeros": (torch.tensor(30), 40)}


def test_losses_and_metrics_of_task_and_model():
    """Several losses are added up. A scalar metric counts as one item."""
    assert outputs_of(LOSS) == Outputs({"loss": LOSS}, {})
    several = outputs_of({"a": torch.tensor(1.0), "b": torch.tensor(2.5)}).losses
    assert {name: float(loss) for name, loss in several.items()} == {
        "loss": 3.5,
        "loss_a": 1.0,
        "loss_b": 2.5,
    }
    outputs = outputs_of((LOSS, {"entropy": torch.tensor(0.5)}), Sparse())
    assert outputs.losses == {"loss": LOSS}
    assert outputs.metrics == {"entropy": (torch.tensor(0.5), 1), "zeros": (torch.tensor(30), 40)}


def test_a_metric_is_weighted_by_its_counts():
    """The mean is over all items of the micro-batches and steps, and not a mean of means."""
    sums: dict[str, float] = {}
    for correct, n in ((1, 2), (6, 8), (0, 10)):
        shares = outputs_of((LOSS, {"accuracy": (torch.tensor(correct), n)})).shares(3, copies=1)
        for name, share in shares.items():
            sums[name] = sums.get(name, 0.0) + float(share)
    assert means(sums, steps=1) == {"train/loss": pytest.approx(2.0), "train/accuracy": 7 / 20}


def test_a_metric_without_items_is_left_out():
    assert means({"loss": 3.0, "sum/hits": 0.0, "count/hits": 0.0}, steps=2) == {"train/loss": 1.5}


def test_shares_keep_no_graph_and_ranks_of_one_model_copy_count_once():
    """With tensor parallelism, the ranks of one copy compute the same values."""
    weight = torch.ones((), requires_grad=True)
    shares = outputs_of((weight * 2, {"accuracy": (weight * 3, 4)})).shares(8, copies=2)
    assert (float(shares["sum/accuracy"]), float(shares["count/accuracy"])) == (1.5, 2.0)
    assert not any(share.requires_grad for share in shares.values())


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.ones(2), r"loss\(model, batch\) must return scalar tensors, not \(2,\) as loss"),
        ({"a": LOSS, "b": 0.5}, r"loss\(model, batch\) must return .* not float as loss_b"),
        ({"a": torch.ones(2)}, r"loss\(model, batch\) must return .* not \(2,\) as loss_a"),
        ({}, r"loss\(model, batch\) must return .* not dict as loss"),
        ((LOSS, {"x": torch.ones(3)}), r"the metric x must be a scalar, .* not \(3,\) and int"),
        ((LOSS, {"x": "much"}), "the metric x must be a scalar, .* not str and int"),
        ((LOSS, {"x": (1.0, 2, 3)}), "the metric x must be .* not float and int and int"),
        ((LOSS, {"lr": 1.0}), "a metric cannot have the name 'lr'"),
        ((LOSS, {"loss_a": 1.0}), "a metric cannot have the name 'loss_a'"),
        ((LOSS, {3: 1.0}), "a metric cannot have the name 3"),
        ((LOSS, {"aux/z": 1.0}), "a metric cannot have the name 'aux/z'"),
        ((LOSS, {"": 1.0}), "a metric cannot have the name ''"),
        ((LOSS, {"a\nb": 1.0}), r"a metric cannot have the name 'a\\nb'"),
        ((LOSS, {"\ud800": 1.0}), r"a metric cannot have the name '\\ud800'"),
        ((LOSS, {"x": 10**400}), "the metric x must be a scalar, .* not int and int"),
        ((LOSS, {"x": ()}), "the metric x must be a scalar"),
    ],
)
def test_outputs_that_cannot_be_averaged_are_refused(returned, found):
    with pytest.raises(CodeError, match=f"the task mine: {found}"):
        check_outputs("the task mine", outputs_of(returned))


@pytest.mark.parametrize(
    ("returned", "step_metrics", "found"),
    [
        ((LOSS, None), dict, r"loss\(model, batch\) must return a dictionary of .*, not NoneType"),
        ((LOSS, {}, {}), dict, r"loss\(model, batch\) must return the loss or .* not 3 values"),
        (LOSS, lambda: None, r"step_metrics\(\) must return a dictionary of .*, not NoneType"),
        (LOSS, {"load": 0.5}, "step_metrics must be a method of the model"),
    ],
)
def test_outputs_without_valid_names_are_refused(returned, step_metrics, found):
    model = Sparse()
    model.step_metrics = step_metrics
    with pytest.raises(CodeError, match=found):
        outputs_of(returned, model)


VALUES = [1, 0.5, True, 10**30, Fraction(1, 4), torch.tensor(2), torch.tensor(True)]


@pytest.mark.parametrize("value", VALUES)
def test_any_number_is_a_metric(value):
    outputs = outputs_of((LOSS, {"x": value}))
    check_outputs("the task mine", outputs)
    share: Tensor = outputs.shares(1, copies=1)["sum/x"]
    assert share.dtype == torch.float64 and float(share) == float(value)
