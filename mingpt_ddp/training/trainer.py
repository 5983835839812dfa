"""The training loop: train a step, log, evaluate, sample, save."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mingpt_ddp.distributed.watchdog import Watchdog
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.metrics.profile import Profiler
from mingpt_ddp.storage.run_dir import RunStatus
from mingpt_ddp.training.anomaly import MAX_CONSECUTIVE_SKIPS
from mingpt_ddp.training.evaluator import Evaluator
from mingpt_ddp.training.hooks import Hooks
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.train_state import (
    Context,
    TrainState,
    has_stopped_early,
    record_evaluation,
)
from mingpt_ddp.training.train_step import sample

log = logging.getLogger(__name__)


class StepFlags:
    """Flags that the ranks all_gather in every step, so that they decide alike."""

    def __init__(self, table: Tensor) -> None:
        """
        Args:
            table: the row of each rank (world size, 4).
        """
        self.interrupted, self.saving, _, _ = (table != 0).any(dim=0).tolist()  # on any rank
        self.is_due = bool(table[0, 2])  # a snapshot, by rank zero's clock
        self.loss = sum(table[:, 3].tolist())  # mean of the step over all ranks


class Trainer:
    """Train a run from its current step to its last one."""

    def __init__(
        self, context: Context, saves: SaveSchedule, evaluator: Evaluator, hooks: Hooks
    ) -> None:
        self.context = context
        self.saves = saves
        self.evaluator = evaluator
        self.hooks = hooks
        self.train_step = saves.train_step
        self.anomaly = saves.anomaly
        self.steps = saves.train_step.steps
        self.config = context.config.trainer
        self.metrics = context.metrics
        self._load_meter()
        self.test_metrics: dict[str, float] = {}
        self._ended: RunStatus | None = None  # before the last step
        self._lr = 0.0
        steps = range(self.state.step, self.steps)
        model = self.train_step.model
        optimizer = self.train_step.optimizer
        runtime = context.runtime
        pause = context.metrics.meter.pause
        self.profiler = Profiler(context.config, runtime, model, optimizer, steps, pause)

    @property
    def state(self) -> TrainState:
        return self.context.state

    def fit(self) -> RunStatus:
        """Train to the last step, or until a signal or the pruner ends the run.

        The last snapshot is then committed.

        Meanwhile signals are deferred to the end of a step, and a watchdog detects ranks that hang.
        """
        begin = time.perf_counter()
        watchdog = Watchdog(self.context.runtime.group)
        self.context.interrupt.deferred = True
        try:
            self.train_step.warm_up()
            self.metrics.meter.pause(time.perf_counter() - begin)
            self._resume_pending_evaluation()
            while self.state.step < self.steps and self._ended is None:
                self._step(self.state.step + 1)
            if self._ended in (None, RunStatus.COMPLETE):
                self._test()
            if self._ended is not RunStatus.PREEMPTED:
                self.metrics.complete(self.state.step)
        finally:
            watchdog.stop()
            self.profiler.close()
            self.metrics.close()
            self.context.interrupt.deferred = False
        return self._ended or RunStatus.COMPLETE

    def _step(self, step: int) -> None:
        """Train one step, then log, evaluate, sample and save if due."""
        with self.profiler.step(step):
            flags = self._train(step)
        if flags is None:  # rolled back
            return
        self.state.step = step
        self.metrics.step_done(step)
        if not flags.saving:
            self.saves.manager.wait()
        if self._is_due(self.config.log_every):
            self._log()
        self._ended = RunStatus.PREEMPTED if flags.interrupted else None
        improved = self._maybe_evaluate()
        self._maybe_prune()
        self._maybe_stop_early()
        if self._ended is None and self._is_due(self.config.sample_every):
            self._log_sample()
        last = self._ended is not None or step == self.steps
        if self._ended is RunStatus.PREEMPTED:
            self.saves.save_on_preemption()
        elif improved or last:
            self.saves.save(last)
        else:
            self.saves.maybe_save(flags.is_due)
        self.metrics.cover(self.saves.manager.last_step)

    def _train(self, step: int) -> StepFlags | None:
        """Train one step unless it is to be skipped; return None after a rollback."""
        if step in self.state.skipped_steps:
            log.info("step %d is skipped after the rollback", step)
            return StepFlags(self._exchange_flags(torch.zeros(()))())
        losses = self.train_step.forward_backward(step)
        self.saves.wait_for_staging()
        wait_for_flags = self._exchange_flags(losses["loss"])
        grad_norm = self.train_step.clip_grad_norm()
        flags = StepFlags(wait_for_flags())
        checks = self.anomaly.checks_every_step
        anomaly = self.anomaly.find_anomaly(flags.loss, float(grad_norm)) if checks else None
        if anomaly is not None:
            return flags if self._skip(step, anomaly) else None
        self.anomaly.on_step_accepted(step, flags.loss)
        with self.metrics.norms.measure(step, self.metrics.log_values):
            self._lr = self.train_step.optimizer_step(step)
        self.context.average.update(step)
        self.metrics.meter.record(losses, grad_norm, self.train_step.data_time_s)
        return flags

    def _exchange_flags(self, loss: Tensor) -> Callable[[], Tensor]:
        """Start an all_gather of the flags.

        Return the function that waits for the table of all ranks.
        """
        interrupted = self.context.interrupt.signal_name is not None
        saving = self.saves.manager.save_in_progress
        loss_sent = float(loss) if self.anomaly.checks_every_step else 0.0
        row = torch.tensor(
            [interrupted, saving, self.saves.is_due(), loss_sent], dtype=torch.float64
        )
        return self.context.runtime.group.all_gather_async(row)

    def _skip(self, step: int, anomaly: str) -> bool:
        """Skip the step, roll back or stop, by trainer.on_nonfinite.

        Return whether the step is skipped.

        Raises:
            TrainingError: the run stops.
        """
        self.train_step.clear()
        message = f"step {step} has {anomaly} ({self.train_step.diagnose(step)})"
        self.state.consecutive_skips += 1
        policy = self.config.on_nonfinite
        if policy == "stop" or self.state.consecutive_skips > MAX_CONSECUTIVE_SKIPS:
            self.saves.manager.wait()
            again = (
                ""
                if policy == "stop"
                else f", as did the {self.state.consecutive_skips - 1} before it"
            )
            raise self.anomaly.make_error(f"{message}{again}")
        if policy == "rollback" and self._rollback(step, message):
            return False
        log.warning("%s and is skipped", message)
        return True

    def _rollback(self, step: int, message: str) -> bool:
        """Restore the newest snapshot and mark the step to be skipped.

        Return False if there is no snapshot.
        """
        restored = self.saves.restore_latest()
        if restored is None:
            return False
        left = self.saves.update_wall_time()
        restored.skipped_steps = sorted({*restored.skipped_steps, *left.skipped_steps, step})
        restored.consecutive_skips = left.consecutive_skips
        restored.world_size = left.world_size
        restored.run_id = left.run_id
        restored.wasted_seconds = left.wasted_seconds + left.wall_seconds - restored.wall_seconds
        log.warning(
            "%s: rolled back to the snapshot of step %d, to skip step %d",
            message,
            restored.step,
            step,
        )
        self.context.state = restored
        self._load_meter()
        self.metrics.rollback(restored.step)
        return True

    def _load_meter(self) -> None:
        state = self.state
        self.metrics.meter.load_state(
            {"loss": state.loss_sum, **state.loss_part_sums}, state.loss_steps
        )

    def _is_due(self, every: int | None) -> bool:
        step = self.state.step
        return step == self.steps or (every is not None and step % every == 0)

    def _resume_pending_evaluation(self) -> None:
        """Run the evaluation that a signal interrupted, and the pruning, stopping and saving after
        it.
        """
        improved = self.state.step > 0 and self._maybe_evaluate()
        self._maybe_prune()
        self._maybe_stop_early()
        is_last = self.state.step == self.steps
        has_ended = (is_last or self._ended is not None) and self._ended is not RunStatus.PREEMPTED
        # of a step that is saved already, this applies the retention alone
        if improved or has_ended:
            self.saves.save(last=has_ended)
        if is_last:
            self._log_sample()

    def _maybe_evaluate(self) -> bool:
        """Evaluate if due; return whether to save the step as the best so far."""
        state = self.state
        if not self._is_due(self.config.eval_every) or self._ended or state.val_step == state.step:
            return False
        begin = time.perf_counter()
        metrics = self._run_evaluator("val")
        self.metrics.meter.pause(time.perf_counter() - begin)
        if metrics is None:
            return False
        if not math.isfinite(loss := metrics["loss"]):
            raise TrainingError(
                f"the validation loss of step {state.step} is {loss}; start again with a "
                "lower optimizer.lr"
            )
        improved = record_evaluation(state, metrics, self.config.min_delta)
        self.metrics.log_evaluation(state.step, "val", metrics)
        self.hooks.call("evaluate", state.step, metrics)
        return improved and self.context.config.snapshot.keep_best

    def _test(self) -> None:
        """Evaluate the test split, if there is one, at the end of the run."""
        self.test_metrics = self._run_evaluator("test") or {}
        if self.test_metrics:
            self.metrics.log_evaluation(self.state.step, "test", self.test_metrics)

    def _run_evaluator(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split; None if a signal interrupted it, which preempts the
        run.
        """
        interrupt = self.context.interrupt
        with self._averaged_weights():
            metrics = self.evaluator.run(
                self.train_step.model, split, stop=lambda: interrupt.signal_name is not None
            )
        if metrics is None:
            self._ended = RunStatus.PREEMPTED
        return metrics

    def _averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, if trainer.ema is set."""
        if self.context.average.decay is not None:
            self.saves.wait_for_staging()  # it would copy them as the weights
        return self.context.average.applied()

    def _maybe_prune(self) -> None:
        """End the job of a sweep if the pruner says so after an evaluation."""
        state = self.state
        if (
            self._ended
            or state.best_val_loss is None
            or state.step == self.steps
            or state.val_step != state.step
        ):
            return
        if self.context.pruner.should_prune(state.step, state.best_val_loss):
            self._ended = RunStatus.PRUNED

    def _maybe_stop_early(self) -> None:
        """End the run after an evaluation if trainer.patience is at its end."""
        state = self.state
        patience = self.config.patience
        if self._ended is None and has_stopped_early(state, patience) and state.step < self.steps:
            self._ended = RunStatus.COMPLETE
            values = (state.step, patience, state.patience_loss)
            log.info(
                (
                    "stopped early at step %d: trainer.patience=%d evaluations in a row have no "
                    "loss below %.4f"
                ),
                *values,
            )

    def _log_sample(self) -> None:
        self.context.runtime.group.set_activity("sampling")
        step = self.state.step
        train_step = self.train_step
        with self._averaged_weights():
            text = sample(self.context.runtime, train_step.task, train_step.model, step)
        self.metrics.log_sample(step, text)

    def _log(self) -> None:
        state = self.saves.update_wall_time()
        metrics = self.metrics.log_train(
            state.step, self.train_step.parallel_model, self._lr, state.goodput
        )
        if metrics:
            state.train_loss = metrics["train/loss"]
            self.anomaly.check(state.step, state.train_loss, metrics["train/grad_norm"])
            self.hooks.call("step", state.step, metrics)
