"""What follows an evaluation: records, pruning, early stopping; whose weights are evaluated."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from tasks import noted_pause

from mingpt_ddp.errors import TrainingError
from mingpt_ddp.storage.run_directory import RunStatus
from mingpt_ddp.training.after_evaluation import Decision, Validation
from mingpt_ddp.training.hooks.actions import Actions
from mingpt_ddp.training.hooks.observers import Observers
from mingpt_ddp.training.train_state import TrainState

METRICS = {"loss": 2.0, "accuracy": 0.5}


def validation_of(
    state: TrainState | None = None,
    metrics: dict[str, float] | None = METRICS,
    keep_best: bool = True,
    patience: int | None = None,
    decay: float | None = None,
) -> tuple[Validation, Mock]:
    """Return a validation and the parts that note its calls, in one order."""
    parts = Mock()
    parts.evaluator.run_unless_stopped.return_value = metrics
    parts.evaluator.sample.return_value = "a text"

    parts.metrics.meter.paused = partial(noted_pause, parts)

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        parts.average_in()
        yield
        parts.average_out()

    config = SimpleNamespace(
        trainer=SimpleNamespace(min_delta=0.25, patience=patience),
        snapshot=SimpleNamespace(keep_best=keep_best),
        sweep=SimpleNamespace(metric=None),
    )
    average = SimpleNamespace(decay=decay, applied=applied)
    run = SimpleNamespace(
        config=config,
        state=state or TrainState(step=4),
        runtime=SimpleNamespace(group=parts.group),
        trainable=SimpleNamespace(model="model", average=average, actions=Actions(None, None, ())),
    )
    observers = Observers(parts.hooks, [], parts.judge, SimpleNamespace(signal_name=None))
    return Validation(run, parts.metrics, parts.saves, parts.evaluator, observers), parts


def names(parts: Mock) -> list[str]:
    return [each[0] for each in parts.mock_calls]


def test_a_step_is_evaluated_once():
    validation, parts = validation_of(TrainState(step=4, val_step=4, best_val_loss=9.0))
    assert validation.evaluate() == Decision(improved=False, end=None)
    assert not parts.mock_calls
    validation.state.step = 5
    assert validation.evaluate() == Decision(improved=True)


def test_an_evaluation_is_recorded_logged_and_given_to_the_hooks():
    """The meters exclude its seconds."""
    validation, parts = validation_of()
    assert validation.evaluate() == Decision(improved=True)
    state = validation.state
    assert (state.val_loss, state.val_step, state.val_metrics) == (2.0, 4, METRICS)
    assert names(parts)[0] == "pause"
    assert parts.mock_calls[-3:] == [
        call.go_on(),
        call.metrics.log_evaluation(4, "val", METRICS),
        call.hooks.call("evaluate", 4, METRICS),
    ]


def test_a_signal_during_an_evaluation_preempts_the_run():
    validation, parts = validation_of(metrics=None)
    assert validation.evaluate() == Decision(improved=False, end=RunStatus.PREEMPTED)
    assert validation.state == TrainState(step=4)
    assert names(parts)[-1] == "go_on"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_ends_the_run(loss):
    validation, parts = validation_of(metrics={"loss": loss})
    with pytest.raises(TrainingError) as error:
        validation.evaluate()
    message = f"the validation loss of step 4 is {loss}; start again with a lower optimizer.lr"
    assert str(error.value) == f"training error: {message}"
    assert validation.state == TrainState(step=4)
    assert not parts.hooks.mock_calls


@pytest.mark.parametrize(
    ("best", "keep_best", "improved"),
    [(None, True, True), (2.1, True, True), (2.0, True, False), (2.1, False, False)],
)
def test_a_step_is_saved_as_the_best_if_the_best_is_kept(best, keep_best, improved):
    state = TrainState(step=4, best_val_loss=best)
    validation, _ = validation_of(state, keep_best=keep_best)
    assert validation.evaluate().improved is improved
    assert state.best_val_loss == 2.0


def test_patience_counts_from_a_loss_lower_by_min_delta():
    state = TrainState(step=4, patience_loss=2.2)
    validation_of(state)[0].evaluate()
    assert (state.patience_loss, state.evaluations_above) == (2.2, 1)


@pytest.mark.parametrize(
    ("reason", "is_last", "best", "val_step", "end"),
    [
        ("too high", False, 2.0, 4, RunStatus.PRUNED),
        (None, False, 2.0, 4, None),
        ("too high", True, 2.0, 4, None),
        ("too high", False, None, 4, None),
        ("too high", False, 2.0, 3, None),  # not evaluated at this step
    ],
)
def test_an_evaluation_is_reported_and_may_end_the_job(reason, is_last, best, val_step, end):
    """That of the last step is reported too: other jobs are compared with it."""
    state = TrainState(step=4, best_val_loss=best, val_step=val_step, val_metrics=METRICS)
    validation, parts = validation_of(state)
    parts.judge.return_value = reason
    parts.group.run_on_rank_zero = lambda work: work()
    assert validation.prune(is_last) is end
    is_reported = best is not None and val_step == 4
    assert parts.mock_calls == ([call.judge(4, METRICS)] if is_reported else [])


def test_nothing_is_reported_outside_of_a_study():
    state = TrainState(step=4, best_val_loss=2.0, val_step=4)
    validation, parts = validation_of(state)
    validation.observers = replace(validation.observers, judge=None)
    assert validation.prune(False) is None
    assert not parts.mock_calls


@pytest.mark.parametrize(
    ("patience", "above", "is_last", "end"),
    [
        (2, 2, False, RunStatus.COMPLETE),
        (2, 1, False, None),
        (2, 2, True, None),
        (None, 2, False, None),
    ],
)
def test_a_run_stops_early_before_its_last_step(patience, above, is_last, end, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    state = TrainState(step=4, val_step=4, evaluations_above=above, patience_loss=1.5)
    validation, _ = validation_of(state, patience=patience)
    assert validation.stop_early(is_last) is end
    message = (
        "stopped early at step 4: trainer.patience=2 evaluations in a row have no loss below 1.5000"
    )
    assert caplog.messages == ([message] if end else [])


@pytest.mark.parametrize("metrics", [METRICS, {}, None])
def test_the_test_split_is_logged_if_there_is_one(metrics):
    """Without one there are no metrics; None if a signal came."""
    validation, parts = validation_of(metrics=metrics)
    assert validation.test() == metrics
    logged = [call.log_evaluation(4, "test", METRICS)] if metrics else []
    assert parts.metrics.mock_calls == logged
    assert parts.evaluator.run_unless_stopped.call_args.args[:2] == ("model", "test")


def test_a_signal_stops_the_evaluator():
    validation, parts = validation_of()
    validation.evaluate()
    model, split, stop = parts.evaluator.run_unless_stopped.call_args.args
    assert (model, split) == ("model", "val")
    assert not stop()
    validation.observers.signals.signal_name = "SIGTERM"
    assert stop()


def test_a_sample_is_logged():
    validation, parts = validation_of()
    validation.log_sample()
    expected: list[Any] = [
        call.group.set_activity("sampling after step 4"),
        call.pause(),
        call.average_in(),
        call.evaluator.sample("model", 4),
        call.average_out(),
        call.go_on(),
        call.metrics.log_sample(4, "a text"),
    ]
    assert parts.mock_calls == expected


@pytest.mark.parametrize("decay", [None, 0.0, 0.9])
def test_averaged_weights_wait_for_the_staging_of_a_snapshot(decay):
    """It would copy them as the weights; the model's own need no wait."""
    waits = [] if decay is None else ["saves.wait_for_staging"]
    for use, used in (
        ("evaluate", "run_unless_stopped"),
        ("test", "run_unless_stopped"),
        ("log_sample", "sample"),
    ):
        validation, parts = validation_of(decay=decay)
        getattr(validation, use)()
        others = ("group.", "metrics.", "pause", "go_on")
        order = [name for name in names(parts) if not name.startswith(others)]
        assert order[: len(waits) + 3] == [
            *waits,
            "average_in",
            f"evaluator.{used}",
            "average_out",
        ]


@pytest.mark.parametrize("have_state", [False, True])
def test_hooks_with_state_wait_for_the_staging_of_a_snapshot(have_state):
    """It would copy what they change: a step that is skipped does not wait for it."""
    validation, parts = validation_of()
    parts.actions.have_state = have_state
    parts.actions.evaluate.return_value = {}
    validation.run.trainable.actions = parts.actions
    validation.evaluate()
    before = names(parts)[: names(parts).index("actions.evaluate")]
    assert ("saves.wait_for_staging" in before) is have_state
