"""The validation loss covers the whole text: every character except the first, exactly once."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from multiprocess.ranks import configure
from tasks import gpt_config, text_task
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data import dataloader
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import build_model
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.tasks import LanguageModel
from mingpt_ddp.training.evaluation.evaluator import Evaluator, means_of_ranks

torch.set_num_threads(1)  # more threads only slow down tensors this small

T, V = 8, 11
# Behind the whole windows, 0, 1 or more characters are left over.
LENGTHS = [2, T, T + 1, T + 2, 5 * T + 1, 103]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(
        from_mapping(configure("trainer.device=cpu", "trainer.precision=fp32")), DistEnv()
    )


def text(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, V, length).astype(np.uint8)


class MeanOfTargets(nn.Module):
    """A model that records the evaluated targets.

    The task of `evaluator` uses their mean as the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []


def mean_of_targets(
    model: MeanOfTargets, batch: tuple[Tensor, Tensor]
) -> dict[str, tuple[Tensor, int]]:
    x, y = batch
    assert torch.equal(x[:, 1:], y[:, :-1])
    model.seen += y.flatten().tolist()
    return {"loss": (y.double().sum(), y.numel())}


def evaluator(tokens: np.ndarray, runtime: Runtime, windows: int | None = None) -> Evaluator:
    changes = [f"trainer.eval_steps={windows}"] if windows else []
    config = from_mapping(configure(*changes, "trainer.batch_size=1", f"data.block_size={T}"))
    task = text_task(config, tokens, V)
    metrics = task.metrics
    task.metrics = lambda model, batch: (
        mean_of_targets if isinstance(model, MeanOfTargets) else metrics
    )(model, batch)
    return Evaluator(task, runtime)


@pytest.mark.parametrize("per_batch", [1, 2 * T])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_character_is_predicted_once(runtime, monkeypatch, length, per_batch):
    """Each character is its own position, so that it can be identified.

    The mean is over characters.
    """
    monkeypatch.setattr(dataloader, "EVALUATION_BATCH_TOKENS", per_batch)
    model = MeanOfTargets()
    loss = evaluator(np.arange(length, dtype=np.uint16), runtime).run(model, "val")["loss"]
    assert model.seen == list(range(1, length))
    assert loss == pytest.approx(length / 2)  # the mean of 1 to length - 1


class Thirds(LanguageModel):
    """A user's task with its own metric."""

    def measure(self, logits, targets):
        third = targets == self.tokenizer.encode("c")[0]
        return {**super().measure(logits, targets), "thirds": (third.sum(), targets.numel())}


def test_a_metric_of_the_logits_needs_no_extra_forward_pass(runtime, monkeypatch):
    monkeypatch.setattr(dataloader, "EVALUATION_BATCH_TOKENS", T)
    model = build_model(gpt_config(n_layer=1), V, T)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    tokens = np.arange(5 * T + 1, dtype=np.uint16) % V
    metrics = {}
    for kind in (LanguageModel, Thirds):
        config = from_mapping(configure("trainer.batch_size=1", f"data.block_size={T}"))
        task = text_task(config, tokens, V)
        task.__class__ = kind
        metrics[kind] = Evaluator(task, runtime).run(model, "val")
        assert len(calls) == len(task.split("val", runtime.device))
        calls.clear()
    assert metrics[Thirds].pop("thirds") == np.mean(tokens[1:] == 2)
    assert metrics[Thirds] == metrics[LanguageModel]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_evaluation_must_fit_into_memory(runtime, is_first):
    """In a later evaluation, other processes may have taken the memory."""
    evaluating = evaluator(text(T + 1), runtime)
    if not is_first:
        evaluating.run(MeanOfTargets(), "val")

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    evaluating.task.metrics = fail
    expected = ConfigError if is_first else torch.OutOfMemoryError
    with pytest.raises(expected, match="the first evaluation does" if is_first else "CUDA"):
        evaluating.run(MeanOfTargets(), "val")


@pytest.mark.parametrize("per_batch", [2 * T])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_loss_equals_that_of_a_naive_loop(runtime, monkeypatch, length, per_batch):
    """The loop predicts one character after another, each from those before it in its window."""
    monkeypatch.setattr(dataloader, "EVALUATION_BATCH_TOKENS", per_batch)
    torch.manual_seed(0)
    model = build_model(gpt_config(n_layer=1, dropout=0.5, bias=False), V, T)
    with torch.no_grad():
        model.token_embedding.weight.mul_(30)
    model.eval()
    tokens = text(length)
    total = 0.0
    with torch.no_grad():
        for position in range(1, length):
            window = (position - 1) // T * T
            scores = model(torch.from_numpy(tokens[window:position].astype(np.int64))[None])[0, -1]
            total -= float(F.log_softmax(scores, dim=-1)[tokens[position]])
    model.train()
    assert evaluator(tokens, runtime).run(model, "val")["loss"] == pytest.approx(
        total / (length - 1), rel=1e-5
    )


@pytest.mark.parametrize("windows", [1, 3, 12, 13, 99])
def test_a_sample_of_windows(runtime, monkeypatch, windows):
    """103 characters have 12 full windows. A sample has each window at most once, and is always
    the same.
    """
    monkeypatch.setattr(dataloader, "EVALUATION_BATCH_TOKENS", 2 * T)
    seen = []
    for _ in range(2):
        model = MeanOfTargets()
        loss = evaluator(np.arange(103, dtype=np.uint16), runtime, windows).run(model, "val")[
            "loss"
        ]
        assert loss == pytest.approx(np.mean(model.seen))
        seen.append(model.seen)
    assert seen[0] == seen[1]
    starts = seen[0][::T]
    if windows < 12:
        assert len(seen[0]) == windows * T
        assert seen[0] == [start + i for start in sorted(starts) for i in range(T)]
        assert all((start - 1) % T == 0 for start in starts)
    else:
        assert seen[0] == list(range(1, 103))


def test_a_sample_is_drawn_from_the_whole_text(runtime):
    model = MeanOfTargets()
    loss = evaluator(np.arange(8001, dtype=np.uint16), runtime, 300).run(model, "val")["loss"]
    assert loss == pytest.approx(4000, rel=0.1)
    assert len(set(model.seen)) == 300 * T


def test_the_model_is_evaluated_without_dropout_and_restored(runtime):
    model = build_model(gpt_config(n_layer=1, dropout=0.5, bias=False), V, T).train()
    evaluate = partial(evaluator(text(103), runtime).run, model, "val")
    before = torch.get_rng_state()
    assert evaluate() == evaluate()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    evaluate()
    assert not model.training


def test_counts_are_weights_and_a_metric_without_items_has_no_mean():
    parts = [
        {"loss": ([3.0], 1.0), "weighted": ([1.0], 0.5), "rare": ([0.0], 0.0)},
        {"loss": ([1.0], 3.0), "weighted": ([2.0], 0.25), "rare": ([0.0], 0.0)},
    ]
    assert means_of_ranks(parts) == {"loss": 1.0, "weighted": 4.0}
