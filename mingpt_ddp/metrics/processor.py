"""Send the metrics of a run to the log, the panel, TensorBoard and metrics.jsonl."""

import logging
import time
from datetime import timedelta
from typing import TypeAlias

import torch
import yaml
from torch import nn

from mingpt_ddp.data.dataloader import Loader
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.jsonl import METRICS, JSONLLogger
from mingpt_ddp.metrics.meters import Meter, measured_matmul_flops
from mingpt_ddp.metrics.norms import LayerNorms
from mingpt_ddp.metrics.panel import Panel
from mingpt_ddp.metrics.peak_flops import vendor_peak_flops
from mingpt_ddp.metrics.stragglers import Stragglers
from mingpt_ddp.metrics.tensorboard import TensorBoardLogger
from mingpt_ddp.metrics.trackers.csv_file import CSVLogger
from mingpt_ddp.metrics.trackers.outbox import Outbox
from mingpt_ddp.metrics.trackers.sample_texts import append_sample
from mingpt_ddp.models import flops_per_token
from mingpt_ddp.storage.run_dir import run_directory
from mingpt_ddp.tasks.task import Task

log = logging.getLogger(__name__)

Logger: TypeAlias = TensorBoardLogger | JSONLLogger | CSVLogger | Outbox
SPLITS = {"val": "validation", "test": "test"}


class MetricsProcessor:
    """Collect metrics as dicts by tag and pass them to the sinks.

    docs/logs.md documents the tags.
    """

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        loader: Loader,
        model: nn.Module,
        steps: range,
        started_at: float,
    ) -> None:
        """
        Args:
            model: not wrapped; utilization is logged if it has `flops_per_token()`.
            steps: range(steps done so far, steps of the whole run).
            started_at: time.monotonic() when this attempt began.
        """
        self.runtime = runtime
        self.task = task
        self.steps = steps
        self.steps_per_epoch = loader.steps_per_epoch
        directory = run_directory(task.config)
        chosen = task.config.tracker
        env = runtime.group.env
        self.tensorboard = TensorBoardLogger(
            directory / "tensorboard" / f"rank{env.rank}", chosen.tensorboard
        )
        files: list[Logger] = [
            JSONLLogger(directory / METRICS),
            *([CSVLogger(directory)] if chosen.csv else []),
        ]
        self.outboxes: list[Outbox] = []
        self.loggers: list[Logger] = [
            self.tensorboard,
            *(env.call_on_rank_zero(lambda: files) or []),
        ]
        # rank zero alone writes metrics of the whole run
        self.run_loggers = env.call_on_rank_zero(lambda: self.loggers) or []
        self.panel = Panel(env, str(directory), steps, task.unit)
        self.meter = Meter(runtime, loader.items_per_step, task.unit)
        self.norms = LayerNorms(runtime.group, model, task.config.trainer.norms_every)
        self.stragglers = Stragglers(runtime.group, steps.start)
        self._flops_per_token = flops_per_token(model)
        self._matmul_flops = 0.0
        self._peak_flops = vendor_peak_flops(runtime.device, runtime.dtype)
        self._is_set_up = False
        self._started_at: float | None = started_at  # None once the first step is done
        for logger in self.loggers:
            logger.start(steps.start, runtime.group.world_size)

    def attach(self, outboxes: list[Outbox]) -> None:
        """Send all metrics to trackers, too."""
        self.outboxes = outboxes
        self.loggers.extend(outboxes)

    def cover(self, step: int | None) -> None:
        """Let the trackers have the points before `step`, the last one with a durable snapshot."""
        self.panel.snapshot_step = step
        for outbox in self.outboxes:
            outbox.cover(step or 0)

    def step_done(self, step: int) -> None:
        """Show that a step is done."""
        begin = time.perf_counter()
        self.panel.advance(step)
        if self._started_at is not None:
            log.info("the first step was done after %.2f s", time.monotonic() - self._started_at)
            self._started_at = None
            self.meter.pause(time.perf_counter() - begin)  # the panel imports rich

    def _set_up(self) -> None:
        """Open TensorBoard and measure the matmul rate; deferred so as not to delay the first
        step.
        """
        if self._is_set_up:
            return
        begin = time.perf_counter()
        self.tensorboard.open()
        step = self.steps.start + 1
        config = yaml.safe_dump(self.task.config.to_dict(), sort_keys=False)
        self.runtime.group.env.call_on_rank_zero(
            lambda: self.tensorboard.log_text(step, "config", config)
        )
        if self._flops_per_token is not None:
            self._matmul_flops = measured_matmul_flops(self.runtime.device, self.runtime.dtype)
            if self.runtime.device.type == "cuda":
                # exclude the measurement's matrices
                torch.cuda.reset_peak_memory_stats(self.runtime.device)
        self.meter.pause(time.perf_counter() - begin)
        self._is_set_up = True

    def rollback(self, step: int) -> None:
        """Discard the metrics of the steps after `step`, which will be repeated."""
        for logger in self.loggers:
            logger.rollback(step)

    def log_train(self, step: int, model: nn.Module, lr: float, goodput: float) -> dict[str, float]:
        """Log the steps since the last call. A collective.

        Args:
            model: wrapped for training.
            goodput: of the whole run; rank zero logs it.

        Returns:
            All metrics of this rank by tag; {} if all steps since the last call were skipped.
        """
        measured = self.meter.read()
        if not measured:
            return {}
        self._set_up()
        communication_s, exposed_s = self.runtime.strategy.comm_times(model)
        times = {
            "speed/communication_ms": communication_s * 1e3,
            "speed/communication_exposed_ms": exposed_s * 1e3,
        }
        work_ms = measured["speed/work_ms"]
        clock = self.runtime.strategy.clock
        slowest = self.stragglers.check(
            step, work_ms, measured["speed/data_ms"], clock.micro_batches
        )
        metrics = {"train/lr": lr, "train/epoch": step / self.steps_per_epoch, **measured, **times}
        per_s = metrics[f"speed/{self.task.unit}_per_s"]
        if self._flops_per_token is not None:
            gpus = len({*self.runtime.devices}) * self.runtime.group.world_size
            flops = self._flops_per_token * per_s / gpus
            metrics["speed/matmul_utilization"] = flops / self._matmul_flops
            if self._peak_flops is not None:
                metrics["speed/mfu"] = flops / self._peak_flops
        run_metrics = (
            self.runtime.group.env.call_on_rank_zero(lambda: {"speed/goodput": goodput, **slowest})
            or {}
        )
        for logger in self.loggers:
            logger.log(step, {**metrics, **run_metrics})
        self.panel.update({**metrics, **run_metrics})
        brief = f"loss {metrics['train/loss']:.4f}, {per_s:,.0f} {self.task.unit}/s"
        if "speed/mfu" in metrics:
            brief += f", MFU {metrics['speed/mfu']:.1%}"
        left = timedelta(
            seconds=round(min((self.steps.stop - step) * metrics["speed/step_ms"] / 1e3, 1e9))
        )
        details = f"lr {lr:.2e}, gradient norm {metrics['train/grad_norm']:.2f}, {left} left"
        file_only = {"file_only": self.panel.is_drawn}
        epochs = (
            "epoch "
            f"{-(-step // self.steps_per_epoch)}/{-(-self.steps.stop // self.steps_per_epoch)}"
        )
        log.info(
            "step %d/%d: %s, %s, %s", step, self.steps.stop, brief, epochs, details, extra=file_only
        )
        return metrics

    def log_evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Log the task's metrics of a split, `val` or `test`."""
        self.log_values(step, {f"{split}/{name}": value for name, value in metrics.items()})
        log.info("step %d: %s %s", step, SPLITS[split], self.task.describe(metrics))

    def log_values(self, step: int, metrics: dict[str, float]) -> None:
        """Log values of the whole run by tag."""
        self._set_up()
        self.panel.update(metrics)
        for logger in self.run_loggers:
            logger.log(step, metrics)

    def log_sample(self, step: int, text: str | None) -> None:
        """Log a generated text; None on ranks that did not generate it."""
        if text is not None:
            self.tensorboard.log_text(step, "sample", text)
            if self.outboxes:
                append_sample(run_directory(self.task.config), step, text)
            log.info("step %d, a sample:\n%s\n", step, text)

    def complete(self, step: int) -> None:
        """Log that the run is complete, or pruned, at `step`."""
        self.stragglers.log_end()
        for logger in self.run_loggers:
            logger.complete(step, self.task.config)

    def close(self) -> None:
        self.panel.close()
        self.tensorboard.close()
