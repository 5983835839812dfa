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
from mingpt_ddp.distributed.signals import Interrupt
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.metrics.processor import Journal
from mingpt_ddp.snapshots.manager import Saver
from mingpt_ddp.snapshots.train_state import Position
from mingpt_ddp.storage.status import Status
from mingpt_ddp.training.anomaly import Guard
from mingpt_ddp.training.evaluate import Evaluator
from mingpt_ddp.training.pruning import MedianRule
from mingpt_ddp.training.save_schedule import Saves
from mingpt_ddp.training.train_step import Stepper

log = logging.getLogger(__name__)


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: the smaller limit of the two."""
    limits = [config.trainer.max_steps, config.trainer.max_epochs and config.trainer.max_epochs * steps_per_epoch]
    return min(limit for limit in limits if limit is not None)


@dataclass(frozen=True)
class Votes:
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
        stepper: Stepper,
        evaluator: Evaluator,
        saver: Saver,
        journal: Journal,
        position: Position,
        sample: Callable[[int], str | None],
        rule: MedianRule,
        interrupt: Interrupt,
    ) -> None:
        self.config, self.runtime, self.stepper = config, runtime, stepper
        self.model, self.optimizer, self.evaluator = stepper.model, stepper.optimizer, evaluator
        self.saver, self.position, self.sample = saver, position, sample
        self.steps, self.rule, self.interrupt = stepper.steps, rule, interrupt
        self.journal = journal
        self.journal.meter.load_state(position.loss_sum, position.loss_steps)
        self.guard = Guard(config, runtime.scaler.is_enabled(), runtime.device)
        self.saves = Saves(config, runtime, saver, stepper, journal, position, self.guard)
        self._ended: Status | None = None  # before the last step
        self._lr = 0.0

    def fit(self) -> Status:
        """Train to the last step, or to where a signal or the rule for a sweep's jobs ends it.

        Whatever happens, the newest snapshot is whole.
        """
        begin = time.perf_counter()
        self.stepper.settle()
        self.journal.meter.pause(time.perf_counter() - begin)
        try:
            self._catch_up()
            while self.position.step < self.steps and self._ended is None:
                self._step(self.position.step + 1)
            if self._ended is not Status.PREEMPTED:
                self.journal.complete(self.position.step, self.position.val_loss)
        finally:
            self.journal.close()
        return self._ended or Status.COMPLETE

    def _step(self, step: int) -> None:
        """One step and what is due behind it."""
        if step in self.position.passed_over:
            log.info("step %d is passed over", step)
            votes = self._vote(torch.zeros(()))()
        else:
            loss = self.stepper.gradients(step)
            self.saves.before_update()
            votes_to_come = self._vote(loss)
            norm = self.stepper.clip()
            votes = votes_to_come()
            if not self._take(step, loss, norm, votes):
                return
        self.position.step = step
        self.journal.step_done()
        if not votes.busy:
            self.saver.collect()
        if self._due(step, self.config.trainer.log_every) or step == self.steps:
            self._log(step)
        self._ended = Status.PREEMPTED if votes.interrupted else None
        improved = self._evaluate_if_due(step)
        self._judge(step)
        if self._ended is None and (self._due(step, self.config.trainer.sample_every) or step == self.steps):
            self._show_sample(step)
        last = self._ended is not None or step == self.steps
        if self._ended is Status.PREEMPTED:
            self.saves.save_in_time(self.interrupt.elapsed())
        elif improved or last:
            self.saves.save(last)
        else:
            self.saves.behind(step, votes.due)

    def _vote(self, loss: Tensor) -> Callable[[], Votes]:
        """Begin to tell the other ranks how this one stands."""
        seen = float(loss) if self.guard.looks else 0.0
        due = self.runtime.is_main and self.saves.cadence.is_due()
        own = [self.interrupt.asked is not None, self.saver.busy, due, seen]
        wait = self.runtime.gather_later(torch.tensor(own, dtype=torch.float64))

        def votes() -> Votes:
            table = wait()
            interrupted, busy, due, _ = (table != 0).any(dim=0).tolist()
            return Votes(interrupted, busy, due, table[:, 3])

        return votes

    # A step that must not be taken.

    def _take(self, step: int, loss: Tensor, norm: Tensor, votes: Votes) -> bool:
        """Take the step or leave it out; False where the run has gone back to a snapshot instead."""
        mean = sum(votes.losses.tolist())
        complaint = self.guard.complaint(mean, float(norm), self.position) if self.guard.looks else None
        if complaint is None:
            self.guard.healthy(step, mean, self.position)
            self._lr = self.stepper.update(step)
            self.journal.meter.record(loss, norm, self.stepper.data_s)
            return True
        self.stepper.clear()
        told = f"step {step} has {complaint} ({self.stepper.diagnose(step)})"
        self.position.sick_in_a_row += 1
        policy = self.config.trainer.on_nonfinite
        if policy == "stop" or self.guard.exhausted(self.position):
            self.saver.finish()
            again = "" if policy == "stop" else f", as had the {self.position.sick_in_a_row - 1} before it"
            raise self.guard.sickness(f"{told}{again}")
        if policy == "rollback" and self._go_back(step, told):
            return False
        log.warning("%s and is left out", told)
        return True

    def _go_back(self, step: int, told: str) -> bool:
        """Continue from the last snapshot, without the step that was told about; whether there is one."""
        self.saver.finish()
        found = self.saver.find()
        if found is None:
            return False
        left = self.saves.tick()
        restored = self.saver.restore(found, self.model, self.optimizer)
        restored.passed_over = sorted({*restored.passed_over, *left.passed_over, step})
        restored.sick_in_a_row, restored.world_size = left.sick_in_a_row, left.world_size
        restored.lost_seconds = left.lost_seconds + left.wall_seconds - restored.wall_seconds
        log.warning("%s: back to the snapshot of step %d, to pass over step %d", told, restored.step, step)
        vars(self.position).update(vars(restored))
        self.journal.meter.load_state(restored.loss_sum, restored.loss_steps)
        self.journal.go_back(restored.step)
        return True

    # What happens between the steps.

    @staticmethod
    def _due(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _catch_up(self) -> None:
        """The evaluation that a signal cut short, and what should have followed it."""
        step = self.position.step
        improved = step > 0 and self._evaluate_if_due(step)
        self._judge(step)
        if improved or self._ended is Status.PRUNED:
            self.saves.save(last=self._ended is not None or step == self.steps)
        if step == self.steps:
            self._show_sample(step)

    def _evaluate_if_due(self, step: int) -> bool:
        """Whether the validation loss is the lowest so far, and that is of interest."""
        due = self._due(step, self.config.trainer.eval_every) or step == self.steps
        if not due or self._ended or self.position.val_step == step:
            return False
        begin = time.perf_counter()
        loss = self.evaluator.run(self.model, stop=lambda: self.interrupt.asked is not None)
        self.journal.meter.pause(time.perf_counter() - begin)
        if loss is None:
            self._ended = Status.PREEMPTED
            return False
        if not math.isfinite(loss):
            raise TrainingError(f"the validation loss of step {step} is {loss}; lower optimizer.lr and start anew")
        position = self.position
        position.val_loss, position.val_step = loss, step
        improved = position.best_val_loss is None or loss < position.best_val_loss
        if improved:
            position.best_val_loss, position.best_step = loss, step
        self.journal.validated(step, loss)
        return improved and self.config.snapshot.keep_best

    def _judge(self, step: int) -> None:
        """What has just been evaluated may not be worth the rest of the steps."""
        lowest = self.position.best_val_loss
        if self._ended or lowest is None or step == self.steps or self.position.val_step != step:
            return
        if self.rule.stops(step, lowest):
            self._ended = Status.PRUNED

    def _show_sample(self, step: int) -> None:
        self.runtime.at("sampling")
        self.journal.sampled(step, self.sample(step))

    def _log(self, step: int) -> None:
        readings = self.journal.steps_taken(step, self._lr, self.stepper.wrapped, self.saves.tick().goodput)
        if readings is not None:
            self.position.train_loss = readings.loss
            self.guard.check(step, readings.loss, readings.grad_norm, self.position)
