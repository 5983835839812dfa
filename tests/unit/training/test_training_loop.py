"""The training loop with parts that only note their calls: their order, and what ends a run."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from multiprocess.ranks import configure
from tasks import noted_pause
from torch import Tensor

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.errors import ConfigError, TrainingError
from mingpt_ddp.storage.run_directory import RunStatus
from mingpt_ddp.training import trainer as trainer_module
from mingpt_ddp.training.after_evaluation import Decision
from mingpt_ddp.training.anomaly import MAX_CONSECUTIVE_SKIPS
from mingpt_ddp.training.hooks.observers import Observers
from mingpt_ddp.training.step_flags import StepFlags
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.trainer import Outcome, Trainer

PREEMPTED = RunStatus.PREEMPTED
PRUNED = RunStatus.PRUNED
COMPLETE = RunStatus.COMPLETE


def trainer_of(*overrides: str, state: TrainState | None = None) -> tuple[Trainer, Mock]:
    """Return a trainer of six steps, and its parts, which note their calls in one order."""
    parts = Mock()
    parts.step.steps = parts.step.length.known_steps = 6
    parts.step.passes.side_effect = losses_of
    parts.step.clip.return_value = torch.tensor(1.0)
    parts.step.update.side_effect = lambda step: step / 100
    parts.step.diagnose.return_value = "rank 1"
    parts.step.phase.fetch_s = 0.5
    parts.validation.evaluate.return_value = Decision()
    parts.validation.prune.return_value = None
    parts.validation.stop_early.return_value = None
    parts.validation.test.return_value = {"loss": 1.0}
    parts.metrics.log_train.return_value = {"train/loss": 3.0, "train/grad_norm": 2.0}
    parts.anomaly.find_in_step.return_value = None
    parts.anomaly.make_error.side_effect = lambda text: TrainingError(text)

    parts.metrics.meter.paused = partial(noted_pause, parts)
    run = SimpleNamespace(
        config=from_mapping(configure("trainer.log_every=100", *overrides)),
        directory=Path("run"),
        state=state or TrainState(),
        runtime=SimpleNamespace(group=SimpleNamespace(set_activity=Mock())),
        trainable=SimpleNamespace(model="model", optimizer="optimizer"),
    )
    signals = SimpleNamespace(deferred=False, elapsed=lambda: 1.5)
    observers = Observers(parts.hooks, [], None, signals)
    parts.saves.anomaly = parts.anomaly
    parts.saves.update_wall_time.side_effect = lambda: run.state
    trainer = Trainer(run, parts.step, parts.metrics, parts.saves, parts.validation, observers)
    trainer._send_flags = parts.send_flags
    give_flags(parts)
    parts.reset_mock()
    return trainer, parts


def give_flags(parts: Mock, **flags: bool) -> None:
    """Let the ranks send these flags in every step."""
    parts.send_flags.side_effect = lambda step, losses: partial(
        StepFlags, loss=float(losses["loss"]), **flags
    )


def losses_of(step: int) -> dict[str, Tensor]:
    """Return a loss of ten times the number of the step."""
    return {"loss": torch.tensor(10.0 * step)}


def names(parts: Mock) -> list[str]:
    return [each[0] for each in parts.mock_calls]


PASSES = [
    "step.passes",
    "saves.wait_for_staging",
    "send_flags",
    "step.clip",
    "anomaly.find_in_step",
]
EVERY_STEP = [
    *PASSES,
    "step.update",
    "anomaly.on_step_accepted",
    "metrics.meter.record",
    "metrics.step_done",
    "saves.take_result",
]
LOG = ["saves.update_wall_time", "metrics.log_train", "anomaly.check", "hooks.call"]
DECIDE = ["validation.prune", "validation.stop_early"]


def test_the_order_of_a_run():
    """The last step logs, evaluates and samples, whatever is due."""
    settings = ["trainer.log_every=5", "trainer.eval_every=4", "trainer.sample_every=4"]
    trainer, parts = trainer_of(*settings, state=TrainState(step=2))
    parts.saves.manager.last_step = 1
    profiled: list[int] = []
    trainer.profiler.step = lambda: profiled.append(trainer.state.step + 1)
    assert trainer.train() == Outcome(COMPLETE, {"loss": 1.0})
    evaluate, sample, cover = ["validation.evaluate"], ["validation.log_sample"], ["metrics.commit"]
    assert names(parts) == [
        *["pause", "step.warm_up", "go_on", "saves.begin", *DECIDE],
        *[*EVERY_STEP, *DECIDE, "saves.maybe_save", *cover],
        *[*EVERY_STEP, *evaluate, *DECIDE, *sample, "saves.maybe_save", *cover],
        *[*EVERY_STEP, *LOG, *DECIDE, "saves.maybe_save", *cover],
        *[*EVERY_STEP, *LOG, *evaluate, *DECIDE, "saves.save", *cover],
        *[*sample, "saves.commit", *cover, "validation.test", "metrics.complete", "metrics.close"],
    ]
    lasts = [False, False, False, False, True]  # of the resumed step 2, and of 3 to 6
    assert parts.validation.prune.mock_calls == [call(last) for last in lasts]
    assert parts.validation.stop_early.mock_calls == [call(last) for last in lasts]
    assert profiled == [3, 4, 5, 6]
    assert parts.step.passes.mock_calls == [call(3), call(4), call(5), call(6)]
    assert parts.metrics.step_done.mock_calls == [call(step, 6) for step in (3, 4, 5, 6)]
    assert parts.metrics.commit.mock_calls == [call(1)] * 5
    assert parts.saves.maybe_save.mock_calls == [call(False)] * 3


def test_signals_are_deferred_while_a_run_trains():
    trainer, parts = trainer_of()
    trainer.profiler.close = parts.profiler.close
    signals = trainer.observers.signals

    def fail() -> None:
        assert signals.deferred is True
        raise ZeroDivisionError

    parts.step.warm_up.side_effect = fail
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert names(parts) == ["pause", "step.warm_up", "profiler.close", "metrics.close"]
    assert signals.deferred is False


@pytest.mark.parametrize("failing_step", [None, 3, 4, 5])
def test_the_first_steps_of_a_start_must_fit_into_memory(failing_step):
    """The warm-up and two steps; later, other processes may have taken the memory."""
    trainer, parts = trainer_of(state=TrainState(step=2))
    group = SimpleNamespace(set_activity=Mock(), rank=0, world_size=1)
    trainer.runtime = SimpleNamespace(group=group)
    parts.step.plan.micro_batch_size = 3

    def run(step: int | None = None) -> dict[str, Tensor]:
        if step == failing_step:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses_of(step or 0)

    parts.step.warm_up.side_effect = run
    parts.step.passes.side_effect = run
    expected = torch.OutOfMemoryError if failing_step == 5 else ConfigError
    with pytest.raises(expected) as failed:
        trainer.train()
    if expected is ConfigError:
        assert "a micro-batch of 3 does not fit" in str(failed.value)
    assert parts.step.passes.call_count == (failing_step or 2) - 2


def test_the_meters_exclude_the_warm_up():
    trainer, parts = trainer_of()
    trainer._warm_up()
    assert parts.mock_calls == [
        call.pause(),
        call.step.warm_up(),
        call.go_on(),
        call.saves.begin(),
    ]


def test_the_profiler_knows_the_steps_of_this_start(monkeypatch):
    profiler = Mock()
    monkeypatch.setattr(trainer_module, "Profiler", profiler)
    state = TrainState(step=2, loss_sum=5.0, loss_part_sums={"aux": 1.0}, loss_steps=3)
    trainer, parts = trainer_of(state=state)
    paused = parts.metrics.meter.paused
    runtime = trainer.runtime
    assert profiler.mock_calls == [call(Path("run"), runtime, None, range(2, 6), paused)]
    assert trainer.lr == 0.0
    trainer._load_meter()
    assert parts.mock_calls == [call.metrics.meter.load_state({"loss": 5.0, "aux": 1.0}, 3)]


@pytest.mark.parametrize(
    ("flags", "part", "returns", "end", "calls"),
    [
        (
            {"interrupted": True},
            "prune",
            PRUNED,
            PREEMPTED,
            [call.saves.save_on_preemption(1.5)],
        ),
        (
            {},
            "evaluate",
            Decision(end=PREEMPTED),
            PREEMPTED,
            [call.validation.evaluate(), call.saves.save_on_preemption(1.5)],
        ),
        (
            {},
            "prune",
            PRUNED,
            PRUNED,
            [call.validation.evaluate(), call.validation.prune(False), call.saves.save()],
        ),
        (
            {},
            "stop_early",
            COMPLETE,
            COMPLETE,
            [
                call.validation.evaluate(),
                call.validation.prune(False),
                call.validation.stop_early(False),
                call.saves.save(),
                call.validation.test(),
            ],
        ),
    ],
)
def test_what_ends_a_run_before_its_last_step(flags, part, returns, end, calls):
    """Then it does not sample; nothing asks for another end; only a complete run is tested."""
    trainer, parts = trainer_of("trainer.eval_every=1", "trainer.sample_every=1")
    give_flags(parts, **flags)
    getattr(parts.validation, part).return_value = returns
    assert trainer.train().status is end
    decided = [each for each in parts.mock_calls if each[0].startswith(("validation.", "saves.s"))]
    assert decided == calls
    assert trainer.state.step == 1
    assert parts.metrics.complete.mock_calls == ([] if end is PREEMPTED else [call(1)])


def test_a_snapshot_that_no_rank_is_writing_is_completed_at_once():
    for saving in (True, False):
        trainer, parts = trainer_of(state=TrainState(step=5))
        give_flags(parts, saving=saving)
        trainer.train()
        assert ("saves.take_result" in names(parts)) is not saving


def test_a_step_that_is_due_or_improves_is_saved():
    trainer, parts = trainer_of("trainer.eval_every=1", state=TrainState(step=3))
    parts.send_flags.side_effect = lambda step, losses: partial(
        StepFlags, save_is_due=float(losses["loss"]) == 50
    )
    parts.validation.evaluate.side_effect = [Decision(), Decision(True), *[Decision()] * 2]
    trainer.train()
    saves = [each for each in parts.saves.mock_calls if each[0] in ("save", "maybe_save")]
    assert saves == [call.save(), call.maybe_save(True), call.save()]


@pytest.mark.parametrize(
    ("end", "step", "improved", "expected"),
    [
        (PREEMPTED, 3, True, call.save_on_preemption(1.5)),
        (PREEMPTED, 6, False, call.save_on_preemption(1.5)),
        (PRUNED, 3, False, call.save()),
        (COMPLETE, 3, False, call.save()),
        (None, 6, False, call.save()),
        (None, 3, True, call.save()),
        (None, 3, False, call.maybe_save("is due")),
    ],
)
def test_which_save_follows_which_end(end, step, improved, expected):
    trainer, parts = trainer_of(state=TrainState(step=step))
    trainer._save(Decision(improved, end), "is due")
    assert parts.saves.mock_calls == [expected]


@pytest.mark.parametrize(
    ("end", "tested", "status", "is_logged"),
    [
        (COMPLETE, {"loss": 1.0}, COMPLETE, True),
        (COMPLETE, {}, COMPLETE, True),
        (COMPLETE, None, PREEMPTED, False),  # a signal came
        (PRUNED, {"loss": 1.0}, PRUNED, True),
        (PREEMPTED, {"loss": 1.0}, PREEMPTED, False),
    ],
)
def test_a_complete_run_is_tested_and_an_interrupted_one_is_not_over(
    end, tested, status, is_logged
):
    trainer, parts = trainer_of(state=TrainState(step=3))
    parts.validation.test.return_value = tested
    metrics = (tested or {}) if end is COMPLETE else {}
    assert trainer._end(end) == Outcome(status, metrics)
    assert parts.metrics.complete.mock_calls == ([call(3)] if is_logged else [])
    assert parts.validation.mock_calls == ([call.test()] if end is COMPLETE else [])
    assert parts.saves.mock_calls == ([call.commit()] if end is not PREEMPTED else [])


@pytest.mark.parametrize(("end", "samples"), [(COMPLETE, [call()]), (PREEMPTED, [])])
def test_a_start_at_the_last_step_samples_unless_a_signal_came(end, samples):
    trainer, parts = trainer_of(state=TrainState(step=6))
    trainer._end(end)
    assert parts.validation.log_sample.mock_calls == samples


@pytest.mark.parametrize(
    ("step", "evaluated", "pruned", "stopped", "end", "calls"),
    [
        # nothing is due at step 3
        (3, Decision(True, PREEMPTED), None, None, None, ["prune", "stop_early"]),
        (3, None, PRUNED, COMPLETE, PRUNED, ["prune", "save"]),
        (3, None, None, COMPLETE, COMPLETE, ["prune", "stop_early", "save"]),
        (4, Decision(), None, None, None, ["evaluate", "prune", "stop_early"]),
        (4, Decision(True), None, None, None, ["evaluate", "prune", "stop_early", "save"]),
        (4, Decision(), PRUNED, None, PRUNED, ["evaluate", "prune", "save"]),
        (4, Decision(False, PREEMPTED), PRUNED, COMPLETE, PREEMPTED, ["evaluate"]),
        (6, Decision(), None, None, None, ["evaluate", "prune", "stop_early", "save"]),
        (6, Decision(False, PREEMPTED), None, None, PREEMPTED, ["evaluate"]),
    ],
)
def test_a_start_finishes_the_last_step_of_the_one_before(
    step, evaluated, pruned, stopped, end, calls
):
    trainer, parts = trainer_of("trainer.eval_every=4", state=TrainState(step=step))
    parts.validation.evaluate.return_value = evaluated
    parts.validation.prune.return_value = pruned
    parts.validation.stop_early.return_value = stopped
    assert trainer._finish_resumed_step() is end
    is_last = step == 6
    known = {
        "evaluate": call.validation.evaluate(),
        "prune": call.validation.prune(is_last),
        "stop_early": call.validation.stop_early(is_last),
        "save": call.saves.save(),
    }
    assert parts.mock_calls == [known[name] for name in calls]


def test_a_new_run_has_no_step_to_finish():
    trainer, parts = trainer_of("trainer.eval_every=1")
    assert trainer._finish_resumed_step() is None
    assert not parts.mock_calls


def test_a_step_in_order():
    """The flags travel while the gradients are clipped; nothing is recorded before the update."""
    trainer, parts = trainer_of()

    def send_flags(step: int, losses: dict[str, Tensor]) -> Any:
        parts.send(step, losses)
        return lambda: parts.receive() and StepFlags(loss=float(losses["loss"]))

    trainer._send_flags = send_flags
    assert trainer._train(3) == StepFlags(loss=30.0)
    assert trainer.lr == 0.03
    losses = {"loss": torch.tensor(30.0)}
    assert parts.mock_calls == [
        call.step.passes(3),
        call.saves.wait_for_staging(),
        call.send(3, losses),
        call.step.clip(),
        call.receive(),
        call.anomaly.find_in_step(30.0, torch.tensor(1.0)),
        call.step.update(3),
        call.anomaly.on_step_accepted(3, 30.0),
        call.metrics.meter.record(losses, torch.tensor(1.0), 0.5),
    ]


def test_a_skipped_step_exchanges_flags_alone(caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    trainer, parts = trainer_of(state=TrainState(step=2, skipped_steps=[3]))
    assert trainer._train(3) == StepFlags()
    assert names(parts) == ["send_flags"]
    parts.send_flags.assert_called_once_with(3, {"loss": torch.zeros(())})
    assert caplog.messages == ["step 3 is skipped after the rollback"]


@pytest.mark.parametrize("is_skipped", [True, False])
def test_an_anomaly_is_discarded_and_not_recorded(is_skipped, monkeypatch):
    """The step counts if it is skipped, and is trained again after a rollback."""
    trainer, parts = trainer_of()
    parts.anomaly.find_in_step.return_value = "a spike"
    asked = []
    monkeypatch.setattr(trainer, "_skip", lambda *values: asked.append(values) or is_skipped)
    assert trainer._train(3) == (StepFlags(loss=30.0) if is_skipped else None)
    assert asked == [(3, "a spike", 31.0)]
    assert names(parts) == [*PASSES, "step.discard"]


def test_a_rolled_back_step_is_not_counted():
    trainer, parts = trainer_of("trainer.on_nonfinite=rollback", state=TrainState(step=4))
    parts.anomaly.find_in_step.side_effect = ["a spike", None, None, None]
    parts.saves.restore_latest.return_value = TrainState(step=2)
    trainer.train()
    assert parts.step.passes.mock_calls == [call(5), call(3), call(4), call(6)]
    assert parts.metrics.step_done.mock_calls == [call(step, 6) for step in (3, 4, 5, 6)]


MESSAGE = "step 3 has no loss (rank 1)"
NONFINITE = ("no loss", math.nan)


@pytest.mark.parametrize(
    ("policy", "before", "error"),
    [
        ("stop", 0, MESSAGE),
        ("skip", MAX_CONSECUTIVE_SKIPS, f"{MESSAGE}, as did the 10 before it"),
        ("rollback", MAX_CONSECUTIVE_SKIPS, f"{MESSAGE}, as did the 10 before it"),
    ],
)
def test_an_anomaly_stops_the_run_by_policy_or_when_it_persists(policy, before, error):
    """After the save in progress."""
    state = TrainState(consecutive_skips=before)
    trainer, parts = trainer_of(f"trainer.on_nonfinite={policy}", state=state)
    with pytest.raises(TrainingError) as raised:
        trainer._skip(3, *NONFINITE)
    assert str(raised.value) == f"training error: {error}"
    assert parts.mock_calls == [
        call.step.diagnose(3),
        call.metrics.log_values(3, {"train/loss": math.nan}),
        call.saves.manager.wait(),
        call.anomaly.make_error(error),
    ]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_an_anomaly_is_skipped_by_policy_or_without_a_snapshot(policy, caplog):
    state = TrainState(consecutive_skips=MAX_CONSECUTIVE_SKIPS - 1)
    trainer, parts = trainer_of(f"trainer.on_nonfinite={policy}", state=state)
    parts.saves.restore_latest.return_value = None
    assert trainer._skip(3, *NONFINITE) is True
    assert state.consecutive_skips == MAX_CONSECUTIVE_SKIPS
    assert caplog.messages == [f"{MESSAGE} and is skipped"]
    tries = [] if policy == "skip" else [call.saves.restore_latest()]
    assert parts.mock_calls == [call.step.diagnose(3), *tries]


def test_a_finite_spike_is_not_repeated_to_find_its_cause(caplog):
    """It has none in the hardware, and the rank with the largest loss is not at fault."""
    trainer, parts = trainer_of("trainer.on_nonfinite=skip", state=TrainState())
    assert trainer._skip(3, "loss 9.0000, a spike", 10.0) is True
    assert caplog.messages == ["step 3 has loss 9.0000, a spike and is skipped"]
    assert parts.mock_calls == []


def test_a_rollback_keeps_what_belongs_to_the_run(caplog):
    """Its attempts, its skips, and the time that is lost; all parts share the one train state."""
    left = TrainState(
        step=9,
        skipped_steps=[5, 8],
        consecutive_skips=1,
        world_size=4,
        run_id="ours",
        wall_seconds=70.0,
        wasted_seconds=3.0,
    )
    restored = TrainState(
        step=6, skipped_steps=[5], loss_sum=4.0, loss_steps=2, run_id="old", wall_seconds=50.0
    )
    trainer, parts = trainer_of("trainer.on_nonfinite=rollback", state=left)
    parts.saves.restore_latest.return_value = restored
    assert trainer._skip(10, *NONFINITE) is False
    assert trainer.state is left
    assert left == TrainState(
        step=6,
        skipped_steps=[5, 8, 10],
        consecutive_skips=2,
        world_size=4,
        run_id="ours",
        wall_seconds=50.0,
        wasted_seconds=23.0,
        loss_sum=4.0,
        loss_steps=2,
    )
    assert parts.mock_calls == [
        call.step.diagnose(10),
        call.saves.restore_latest(),
        call.saves.update_wall_time(),
        call.metrics.meter.load_state({"loss": 4.0}, 2),
        call.metrics.rollback(6),
    ]
    rest = "rolled back to the snapshot of step 6, to skip step 10"
    assert caplog.messages == [f"step 10 has no loss (rank 1): {rest}"]


def test_a_log_line_is_checked_and_given_to_the_hooks():
    """On ranks that log nothing there is nothing to check."""
    state = TrainState(step=3, wall_seconds=2.0, stall_seconds=1.0)
    trainer, parts = trainer_of(state=state)
    trainer.lr = 0.25
    trainer._log()
    metrics = {"train/loss": 3.0, "train/grad_norm": 2.0}
    assert parts.mock_calls == [
        call.saves.update_wall_time(),
        call.metrics.log_train(3, 6, parts.step.parallel_model, 0.25, 0.5),
        call.anomaly.check(3, 3.0, 2.0),
        call.hooks.call("step", 3, metrics),
    ]
    assert state.train_loss == 3.0
    parts.reset_mock()
    parts.metrics.log_train.return_value = {}
    trainer._log()
    assert names(parts) == ["saves.update_wall_time", "metrics.log_train"]


def test_what_is_due_at_a_step():
    trainer, _ = trainer_of(state=TrainState(step=4))
    assert [trainer._is_due(every) for every in (None, 1, 2, 3, 4, 8)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    trainer.state.step = 6
    assert trainer._is_due(None) and trainer._is_due(4)
