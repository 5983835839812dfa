"""The training loop. It knows no rank and no GPT: a model is anything that turns (x, y) into a mean loss."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import yaml
from torch import Tensor, nn

from mingpt_ddp.config import Config
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.evaluate import Evaluator
from mingpt_ddp.loader import BatchPlan, Loader
from mingpt_ddp.logs import Progress
from mingpt_ddp.metrics import NATS_PER_BIT, Board, Meter, Readings
from mingpt_ddp.optim import lr_at
from mingpt_ddp.runtime import Runtime
from mingpt_ddp.saver import Position, Saver
from mingpt_ddp.seeds import seed_everything

log = logging.getLogger(__name__)


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: the smaller limit of the two."""
    limits = [config.trainer.max_steps, config.trainer.max_epochs and config.trainer.max_epochs * steps_per_epoch]
    return min(limit for limit in limits if limit is not None)


class Trainer:
    """One run of `steps` optimizer steps, from wherever `position` stands."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        loader: Loader,
        plan: BatchPlan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluator: Evaluator,
        saver: Saver,
        board: Board,
        position: Position,
        sample: Callable[[int], str | None],
        steps: int,
    ) -> None:
        self.config, self.runtime, self.loader, self.plan = config, runtime, loader, plan
        self.model, self.optimizer, self.evaluator = model, optimizer, evaluator
        self.saver, self.board, self.position, self.sample = saver, board, position, sample
        self.steps = steps
        self.meter = Meter(runtime, config.trainer.batch_size * config.data.block_size)
        self.meter.load_state(position.loss_sum, position.loss_steps)
        self.progress = Progress(runtime.place, position.step, self.steps)
        self.wrapped = runtime.wrap(model)
        self._clock = time.perf_counter()
        self._saved_at = time.monotonic()
        self._minutes_due = False

    def fit(self) -> None:
        """Train to the last step; whatever happens, the newest snapshot is whole."""
        self.board.text(self.position.step + 1, "config", yaml.safe_dump(self.config.to_dict(), sort_keys=False))
        self._settle()
        try:
            for step in range(self.position.step + 1, self.steps + 1):
                self._train_step(step)
                self.position.step = step
                self.progress.advance()
                if self._due(step, self.config.trainer.log_every) or step == self.steps:
                    self._log(step)
                due = self._due(step, self.config.trainer.eval_every) or step == self.steps
                improved = due and self._evaluate(step)
                if self._due(step, self.config.trainer.sample_every) or step == self.steps:
                    self._show_sample(step)
                if improved or self._snapshot_due(step):
                    self._save()
            self.board.hparams(self.config.to_dict(), {"hparam/val_loss": self.position.val_loss or math.nan})
        finally:
            self.progress.close()
            self.board.close()

    def _settle(self) -> None:
        first = self.loader.step(1, self.plan, self.runtime.rank)[0]
        self.runtime.settle(self.wrapped, self.runtime.to_device(first.x), self.runtime.to_device(first.y))

    def _train_step(self, step: int) -> None:
        lr = lr_at(step, self.config.optimizer, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        begin = time.perf_counter()
        batch = self.loader.step(step, self.plan, self.runtime.rank)
        data_s = time.perf_counter() - begin
        loss = torch.zeros((), device=self.runtime.device)
        for micro in batch:
            seed_everything("dropout", self.config.run.seed, step, micro.number)
            with self.runtime.share_gradients(self.wrapped, last=micro is batch[-1]):
                loss += self._forward_backward(micro.x, micro.y)
        self.meter.record(loss, self._update(), data_s)

    def _forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        """This micro-batch's share of the step's mean loss, its gradients added up."""
        n_micro, world_size = self.plan.n_micro, self.runtime.world_size
        with self.runtime.autocast():
            loss = self.wrapped(self.runtime.to_device(x), self.runtime.to_device(y))
        # DDP takes the mean over the ranks, the step wants the mean over the micro-batches.
        self.runtime.scaler.scale(loss * (world_size / n_micro)).backward()
        return loss.detach() / n_micro

    def _update(self) -> Tensor:
        """One optimizer step; returns the norm of the gradients before clipping."""
        scaler = self.runtime.scaler
        scaler.unscale_(self.optimizer)
        limit = self.config.trainer.grad_norm_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @staticmethod
    def _due(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _snapshot_due(self, step: int) -> bool:
        wanted, epochs = self.config.snapshot, self.config.snapshot.every_epochs
        by_epoch = self._due(step, epochs and epochs * self.loader.steps_per_epoch)
        return self._minutes_due or by_epoch or self._due(step, wanted.every_steps) or step == self.steps

    def _log(self, step: int) -> None:
        readings = self.meter.read()
        self.position.train_loss = readings.loss
        lr = self.optimizer.param_groups[0]["lr"]
        communication, exposed = self.runtime.communication(self.wrapped)
        self.board.scalars(
            step,
            {
                "train/loss": readings.loss,
                "train/lr": lr,
                "train/grad_norm": readings.grad_norm,
                "speed/tokens_per_s": readings.tokens_per_s,
                "speed/step_ms": readings.step_s * 1e3,
                "speed/data_ms": readings.data_s * 1e3,
                "speed/communication_ms": communication * 1e3,
                "speed/communication_exposed_ms": exposed * 1e3,
                "memory/peak_mib": readings.peak_memory / 2**20,
            },
        )
        self._describe(step, readings, lr)
        self._stop_if_not_finite(step, readings.loss, readings.grad_norm)
        self._look_at_clock()

    def _describe(self, step: int, readings: Readings, lr: float) -> None:
        left = timedelta(seconds=round(min((self.steps - step) * readings.step_s, 1e9)))
        brief = f"loss {readings.loss:.4f}, {readings.tokens_per_s:,.0f} tokens/s"
        self.progress.describe(brief)
        log.info(
            "step %d/%d: %s, lr %.2e, gradient norm %.2f, %s left",
            *(step, self.steps, brief, lr, readings.grad_norm, left),
            extra={"file_only": self.progress.shown},
        )

    def _stop_if_not_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """Every rank sees the same numbers, so all of them stop, and before a snapshot is made of the wreck."""
        scaled = self.runtime.scaler.is_enabled()  # the scaler passes over steps whose gradients overflow
        if not math.isfinite(loss) or not (scaled or math.isfinite(grad_norm)):
            raise TrainingError(
                f"step {step} or one shortly before it has loss {loss} and gradient norm {grad_norm}; "
                "lower optimizer.lr or set trainer.grad_norm_clip, then run again to continue from the last snapshot"
            )

    def _look_at_clock(self) -> None:
        """snapshot.every_minutes by rank 0's clock, so that all ranks agree."""
        minutes = self.config.snapshot.every_minutes
        if minutes is not None:
            elapsed = time.monotonic() - self._saved_at
            self._minutes_due = self.runtime.gather(elapsed >= 60 * minutes)[0]

    def _evaluate(self, step: int) -> bool:
        """Whether the validation loss is the lowest so far."""
        begin = time.perf_counter()
        loss = self.evaluator.run(self.model)
        self.meter.pause(time.perf_counter() - begin)
        position = self.position
        position.val_loss, position.val_step = loss, step
        improved = position.best_val_loss is None or loss < position.best_val_loss
        if improved:
            position.best_val_loss, position.best_step = loss, step
        self.board.results(step, {"val/loss": loss, "val/bits_per_char": loss / NATS_PER_BIT})
        log.info("step %d: validation loss %.4f nats (%.4f bits) per character", step, loss, loss / NATS_PER_BIT)
        return improved and self.config.snapshot.keep_best

    def _show_sample(self, step: int) -> None:
        text = self.sample(step)
        if text is not None:
            self.board.text(step, "sample", text)
            log.info("step %d, a sample:\n%s\n", step, text)

    def _save(self) -> None:
        begin = time.perf_counter()
        self.board.flush()
        position = self.position
        position.wall_seconds += begin - self._clock
        self._clock = begin
        position.loss_sum, position.loss_steps = self.meter.state()
        self._stop_if_not_finite(position.step, position.loss_sum, self.meter.grad_norm())
        self.saver.save(position, self.model, self.optimizer, self.plan.micro_batch_size)
        self._saved_at, self._minutes_due = time.monotonic(), False
        self.meter.pause(time.perf_counter() - begin)
