"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.train_state import TrainState
from mingpt_ddp.storage.run_dir import RunStatus
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.evaluate import Evaluator
from mingpt_ddp.training.pruning import MedianPruner
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.train_step import TrainStep

log = logging.getLogger(__name__)


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: the smaller limit of the two."""
    limits = [config.trainer.max_steps, config.trainer.max_epochs and config.trainer.max_epochs * steps_per_epoch]
    return min(limit for limit in limits if limit is not None)


@dataclass(frozen=True)
class StepFlags:
    """What the ranks told each other in a step; the same on all of them."""

    interrupted: bool  # one is asked to stop
    busy: bool  # one still works on a snapshot
    due: bool  # rank 0's clock says that it is time for one
    losses: Tensor  # (world size) their shares of the step's mean loss, float64


class Trainer:
    """One run, from wherever `position` stands to its last step."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        train_step: TrainStep,
        evaluator: Evaluator,
        saver: SnapshotManager,
        metrics: MetricsProcessor,
        position: TrainState,
        sample: Callable[[int], str | None],
        pruner: MedianPruner,
        interrupt: SignalHandler,
    ) -> None:
        self.config, self.runtime, self.train_step = config, runtime, train_step
        self.model, self.optimizer, self.evaluator = train_step.model, train_step.optimizer, evaluator
        self.saver, self.position, self.sample = saver, position, sample
        self.steps, self.pruner, self.interrupt = train_step.steps, pruner, interrupt
        self.metrics = metrics
        self.metrics.meter.load_state(position.loss_sum, position.loss_steps)
        self.anomaly = AnomalyPolicy(config, runtime.scaler.is_enabled(), runtime.device)
        self.saves = SaveSchedule(config, runtime, saver, train_step, metrics, position, self.anomaly)
        self._ended: RunStatus | None = None  # before the last step
        self._lr = 0.0

    def fit(self) -> RunStatus:
        """Train to the last step, or to where a signal or the pruner for a sweep's jobs ends it.

        Whatever happens, the newest snapshot is whole.
        """
        begin = time.perf_counter()
        self.train_step.warm_up()
        self.metrics.meter.pause(time.perf_counter() - begin)
        try:
            self._resume_pending_eval()
            while self.position.step < self.steps and self._ended is None:
                self._step(self.position.step + 1)
            if self._ended is not RunStatus.PREEMPTED:
                self.metrics.complete(self.position.step, self.position.val_loss)
        finally:
            self.metrics.close()
        return self._ended or RunStatus.COMPLETE

    def _step(self, step: int) -> None:
        """One step and what is due behind it."""
        if step in self.position.skipped_steps:
            log.info("step %d is passed over", step)
            votes = self._exchange_flags(torch.zeros(()))()
        else:
            loss = self.train_step.forward_backward(step)
            self.saves.wait_for_staging()
            votes_to_come = self._exchange_flags(loss)
            norm = self.train_step.clip_grad_norm()
            votes = votes_to_come()
            if not self._apply_step(step, loss, norm, votes):
                return
        self.position.step = step
        self.metrics.step_done()
        if not votes.busy:
            self.saver.finalize()
        if self._due(step, self.config.trainer.log_every) or step == self.steps:
            self._log(step)
        self._ended = RunStatus.PREEMPTED if votes.interrupted else None
        improved = self._evaluate_if_due(step)
        self._maybe_prune(step)
        if self._ended is None and (self._due(step, self.config.trainer.sample_every) or step == self.steps):
            self._log_sample(step)
        last = self._ended is not None or step == self.steps
        if self._ended is RunStatus.PREEMPTED:
            self.saves.save_on_preemption(self.interrupt.elapsed())
        elif improved or last:
            self.saves.save(last)
        else:
            self.saves.maybe_save(step, votes.due)

    def _exchange_flags(self, loss: Tensor) -> Callable[[], StepFlags]:
        """Begin to tell the other ranks how this one stands."""
        seen = float(loss) if self.anomaly.checks_every_step else 0.0
        due = self.runtime.group.is_rank_zero and self.saves.save_interval.is_due()
        own = [self.interrupt.signal_name is not None, self.saver.save_in_progress, due, seen]
        wait = self.runtime.group.all_gather_async(torch.tensor(own, dtype=torch.float64))

        def votes() -> StepFlags:
            table = wait()
            interrupted, busy, due, _ = (table != 0).any(dim=0).tolist()
            return StepFlags(interrupted, busy, due, table[:, 3])

        return votes

    # A step that must not be taken.

    def _apply_step(self, step: int, loss: Tensor, norm: Tensor, votes: StepFlags) -> bool:
        """Take the step or leave it out; False where the run has gone back to a snapshot instead."""
        mean = sum(votes.losses.tolist())
        complaint = (
            self.anomaly.find_anomaly(mean, float(norm), self.position) if self.anomaly.checks_every_step else None
        )
        if complaint is None:
            self.anomaly.on_step_accepted(step, mean, self.position)
            self._lr = self.train_step.optimizer_step(step)
            self.metrics.meter.record(loss, norm, self.train_step.data_time_s)
            return True
        self.train_step.clear()
        told = f"step {step} has {complaint} ({self.train_step.diagnose(step)})"
        self.position.consecutive_skips += 1
        policy = self.config.trainer.on_nonfinite
        if policy == "stop" or self.anomaly.too_many_skips(self.position):
            self.saver.wait()
            again = "" if policy == "stop" else f", as had the {self.position.consecutive_skips - 1} before it"
            raise self.anomaly.make_error(f"{told}{again}")
        if policy == "rollback" and self._rollback(step, told):
            return False
        log.warning("%s and is left out", told)
        return True

    def _rollback(self, step: int, told: str) -> bool:
        """Continue from the last snapshot, without the step that was told about; whether there is one."""
        self.saver.wait()
        found = self.saver.load_latest()
        if found is None:
            return False
        left = self.saves.update_wall_time()
        restored = self.saver.restore(found, self.model, self.optimizer)
        restored.skipped_steps = sorted({*restored.skipped_steps, *left.skipped_steps, step})
        restored.consecutive_skips, restored.world_size = left.consecutive_skips, left.world_size
        restored.wasted_seconds = left.wasted_seconds + left.wall_seconds - restored.wall_seconds
        log.warning("%s: back to the snapshot of step %d, to pass over step %d", told, restored.step, step)
        vars(self.position).update(vars(restored))
        self.metrics.meter.load_state(restored.loss_sum, restored.loss_steps)
        self.metrics.rollback(restored.step)
        return True

    # What happens between the steps.

    @staticmethod
    def _due(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _resume_pending_eval(self) -> None:
        """The evaluation that a signal cut short, and what should have followed it."""
        step = self.position.step
        improved = step > 0 and self._evaluate_if_due(step)
        self._maybe_prune(step)
        if improved or self._ended is RunStatus.PRUNED:
            self.saves.save(last=self._ended is not None or step == self.steps)
        if step == self.steps:
            self._log_sample(step)

    def _evaluate_if_due(self, step: int) -> bool:
        """Whether the validation loss is the lowest so far, and that is of interest."""
        due = self._due(step, self.config.trainer.eval_every) or step == self.steps
        if not due or self._ended or self.position.val_step == step:
            return False
        begin = time.perf_counter()
        loss = self.evaluator.run(self.model, stop=lambda: self.interrupt.signal_name is not None)
        self.metrics.meter.pause(time.perf_counter() - begin)
        if loss is None:
            self._ended = RunStatus.PREEMPTED
            return False
        if not math.isfinite(loss):
            raise TrainingError(f"the validation loss of step {step} is {loss}; lower optimizer.lr and start anew")
        position = self.position
        position.val_loss, position.val_step = loss, step
        improved = position.best_val_loss is None or loss < position.best_val_loss
        if improved:
            position.best_val_loss, position.best_step = loss, step
        self.metrics.log_validation(step, loss)
        return improved and self.config.snapshot.keep_best

    def _maybe_prune(self, step: int) -> None:
        """What has just been evaluated may not be worth the rest of the steps."""
        lowest = self.position.best_val_loss
        if self._ended or lowest is None or step == self.steps or self.position.val_step != step:
            return
        if self.pruner.should_prune(step, lowest):
            self._ended = RunStatus.PRUNED

    def _log_sample(self, step: int) -> None:
        self.runtime.group.set_activity("sampling")
        self.metrics.log_sample(step, self.sample(step))

    def _log(self, step: int) -> None:
        goodput = self.saves.update_wall_time().goodput
        model = self.train_step.parallel_model
        metrics = self.metrics.log_train(step, model, {"train/lr": self._lr}, {"speed/goodput": goodput})
        if metrics is not None:
            loss = self.position.train_loss = metrics["train/loss"]
            self.anomaly.check(step, loss, metrics["train/grad_norm"], self.position)
