"""Tasks compute losses and metrics from a batch, and describe them in the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from tasks import gpt_config, text_task
from torch import nn
from torch.nn import functional as F

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.data.tokenizers.tokenizer import CharTokenizer
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models import build_model
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.tasks.task import Task, batch_length


class Squares(Task):
    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)


GROUP = ProcessGroup(DistEnv(), DDPConfig(), job=0)


def of_kind(kind: type[Task], **attributes: Any) -> Any:
    """Return a task of this class without data."""
    task = kind.__new__(kind)
    vars(task).update(attributes)
    return task


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        (torch.zeros(5, 2), 3),
        [torch.zeros(5)],
        {"x": torch.zeros(5, 1)},
        ({"x": torch.zeros(5)},),
    ],
)
def test_the_number_of_samples_in_a_batch(batch):
    assert batch_length(batch) == 5


def test_label_smoothing_applies_only_to_training():
    """A smoothed target is 1 - 0.3 for the class, plus 0.1 for each of three classes."""
    logits, y = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, -1.0]]), torch.tensor([0, 2])
    targets = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])
    expected = float(-(targets * logits.log_softmax(1)).sum(1).mean())
    config = SimpleNamespace(task=SimpleNamespace(label_smoothing=0.3))
    dataset = SimpleNamespace(tokenizer=CharTokenizer("abc"))
    task = of_kind(LanguageModel, config=config, dataset=dataset)
    batch = (logits[None], y[None])
    assert float(task.loss(nn.Identity(), batch)) == pytest.approx(expected)
    total, n = task.metrics(nn.Identity(), batch)["loss"]
    assert float(total) / n == pytest.approx(float(F.cross_entropy(logits, y)))


def test_without_metrics_the_mean_losses_are_measured():
    x, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.zeros(3, 1)
    total, n = of_kind(Squares).metrics(nn.Identity(), (x, y))["loss"]
    assert (float(total), n) == (21.0, 3)


def test_a_language_model_task(one_thread):
    """The loss is the model's. Accuracy is the share of next tokens that are the likeliest."""
    config = from_mapping(configure("data.block_size=4"))
    task = text_task(config)

    class Model(nn.Module):
        def forward(self, x, y=None):
            logits = F.one_hot((x + 1) % 8, 8).float()
            return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    x, y = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[1, 2, 3, 0]])
    metrics = task.metrics(Model(), (x, y))
    assert float(metrics["accuracy"][0]) / metrics["accuracy"][1] == 0.75
    assert float(metrics["loss"][0]) / 4 == pytest.approx(float(task.loss(Model(), (x, y))))
    means = {name: float(total) / n for name, (total, n) in metrics.items()}
    bits = means["bits_per_char"]
    assert bits == pytest.approx(means["loss"] / 0.6931471805599453)
    assert {*task.comparable} < means.keys()
    expected = (
        f"({bits:.4f} bits) per character, {bits:.4f} bits per byte, accuracy 0.7500, "
        "wiki_loss 2.5000, exact_match 0.3000"
    )
    task.val_texts = {"val_wiki": x}
    means |= {
        "wiki_loss": 2.5,
        "wiki_accuracy": 0.5,
        "exact_match": 0.3,
    }  # the last one comes from a hook
    assert task.describe(means).endswith(expected)
    task.dataset.tokenizer = CharTokenizer("abcdefgß")
    metrics = task.metrics(Model(), (x, torch.tensor([[1, 2, 3, 7]])))
    assert [int(metrics[name][1]) for name in ("loss", "bits_per_char", "bits_per_byte")] == [
        4,
        4,
        5,
    ]


def test_the_return_value_of_measure_is_checked_before_training():
    class Scalar(LanguageModel):
        def measure(self, logits, targets):
            return {**super().measure(logits, targets), "largest": logits.max()}

    task = text_task(from_mapping(configure("data.block_size=4")))
    task.__class__ = Scalar
    model = build_model(gpt_config(n_layer=1), 8, 4)
    x = torch.tensor([[0, 1, 2, 3]])
    with pytest.raises(CodeError, match=r"must return a dictionary of pairs \(sum, number\)"):
        task.check_model(model, (x, x + 1), trained=False)


def test_a_task_is_built_with_its_recorded_state(monkeypatch):
    class Keeping(Squares):
        @classmethod
        def build(cls, config, group, kept):
            return setattr(cls, "kept", kept) or super().build(config, group, kept)

        def extend(self, state):
            assert state == {"weights": 1}

    config = from_mapping(configure("data=toy", "task=regression"))
    monkeypatch.setitem(BUILDERS["task"], "regression", Keeping)
    for given, kept in (
        ((), {}),
        ((None, {"own": 1}), {"own": 1}),
        (({"weights": 1}, {"own": 1}), {"weights": 1}),
    ):
        assert build_task(config, GROUP, *given).kept == kept


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "data=toy",
            "language_model needs a text; for data.dataset=toy write your own task and model",
        ),
        (
            "task=regression",
            r"regression needs your own dataset \(docs/.*\), but python_docs is a text",
        ),
        (
            "task=regression data=toy model=gpt_nano",
            r"gpt takes token ids; choose a text, or samples of torch.int64 with shape",
        ),
        (
            "task=regression data=toy model=convnet",
            r"convnet needs images \(C, H, W\) of at least 4 x 4, not \(10,\)",
        ),
        ("task=regression data=digits model=convnet +task.label_smoothing=0.1", "not a key"),
    ],
)
def test_task_model_and_data_that_do_not_fit_together(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_task(from_mapping(configure(*overrides.split())), GROUP).build_model()


def test_too_many_metrics_are_refused():
    """They are refused before training, because they could not be read again."""

    class Many(Task):
        config = SimpleNamespace(task=SimpleNamespace(name="many"))

        def loss(self, model, batch):
            return torch.tensor(1.0)

        def metrics(self, model, batch):
            return {"loss": (1.0, 1), **{f"accuracy of {i}": (1.0, 1) for i in range(self.labels)}}

    of_kind(Many, labels=10_000).check_model(nn.Identity(), torch.zeros(1), trained=False)
    task = of_kind(Many, labels=100_000)
    with pytest.raises(CodeError, match="many has 100,001 metrics or losses, which take"):
        task.check_model(nn.Identity(), torch.zeros(1), trained=False)
