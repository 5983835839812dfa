"""Send the metrics of a run to the log, the progress line, TensorBoard and metrics.jsonl.

An attempt is one start of the processes of a run.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import yaml
from torch import nn

from mingpt_ddp.data.dataloader import Loader
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import duration
from mingpt_ddp.metrics.jsonl import METRICS, HistoryEnd, JSONLLogger, own_metrics
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.metrics.mfu import Utilization
from mingpt_ddp.metrics.samples import append_sample, drop_samples_after
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.metrics.stragglers import slowest_rank
from mingpt_ddp.metrics.trackers.sending import Sender
from mingpt_ddp.metrics.trackers.tensorboard import TensorBoardLogger
from mingpt_ddp.process.logs import progress_bar
from mingpt_ddp.tasks.task import Task

log = logging.getLogger(__name__)

Logger: TypeAlias = TensorBoardLogger | JSONLLogger
SPLITS = {"val": "validation", "test": "test"}
CONSOLE_LINES = 30  # number of log lines that the console shows before it thins them out


def is_on_console(line: int) -> bool:
    """Return True if the console shows this log line.

    It shows the first 30 lines, each tenth of the first 300, each hundredth of the first 3,000 and
    so on. The log file has all lines.

    Args:
        line: Number of the line since this attempt began, from 1.
    """
    interval = 1
    while line > CONSOLE_LINES * interval:
        interval *= 10
    return line % interval == 0


class MetricsProcessor:
    """Collect the metrics of a run and pass them to the loggers, as dicts by tag.

    docs/logs.md documents the tags.
    """

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        loader: Loader,
        model: nn.Module,
        start: int,
        times: StartTimes,
        directory: Path,
    ) -> None:
        """
        Args:
            model: The model itself, not its DDP wrapper. MFU is logged if it has
                `flops_per_token()`.
            start: Number of steps done so far.
            times: Times of the stages of this attempt's start, such as reading the data.
            directory: The run directory.
        """
        self.runtime = runtime
        self.task = task
        self.start = start
        self.steps_per_epoch = loader.steps_per_epoch
        self._directory = directory
        env = runtime.group.env
        self.tensorboard = TensorBoardLogger(
            directory / "tensorboard" / f"rank{env.rank}", task.config.tracker.tensorboard
        )
        self.senders: list[Sender] = []  # one for each tracker, on rank zero
        self.loggers: list[Logger] = [
            self.tensorboard,
            *(env.call_on_rank_zero(lambda: [JSONLLogger(directory / METRICS)]) or []),
        ]
        self.progress = progress_bar(env, None, "training", "step", start)
        self._log_lines = 0
        self.meter = Meter(runtime, loader.items_per_step, task.unit)
        self.utilization = Utilization(runtime, model)
        self._is_set_up = False
        self._times = times
        self._awaits_first_step = True
        self._reached = 0  # the highest step that an earlier attempt has logged
        for logger in self.loggers:
            logger.start(start, runtime.group.world_size)
        env.call_on_rank_zero(lambda: drop_samples_after(directory, start))

    def resume(self, senders: list[Sender], end: HistoryEnd | None) -> None:
        """Continue the logs of earlier attempts.

        Args:
            senders: One sender for each tracker, on rank zero.
            end: The end of metrics.jsonl, on rank zero. None if the file is missing or damaged.
        """
        self.senders = senders
        if end is not None:
            self._reached = end.reached

    def commit(self, step: int | None) -> None:
        """Send the metrics of the steps before `step` to the trackers.

        Args:
            step: Step of the newest committed snapshot: no restart repeats the steps before it. If
                it is None, there is no such snapshot, and nothing is sent.
        """
        for sender in self.senders:
            sender.commit(step or 0)

    def step_done(self, step: int, last: int | None) -> None:
        """Show on the progress line that a step is done.

        Args:
            last: Last step of the run. None if it is not known.
        """
        if self._awaits_first_step:
            self._awaits_first_step = False
            self._times.done("first step")
            log.info("the first step was done after %.2f s", self._times.elapsed)
            log.info(
                "the stages of this start took: %s",
                self._times.describe(),
                extra={"file_only": True},
            )
        self.progress.total = last
        self.progress.update(step - self.progress.n)
        if self.start < self._reached < step:
            elapsed = self._times.elapsed
            log.info(
                "step %d is the first step that no earlier attempt had done; "
                "it was done after %.2f s",
                step,
                elapsed,
                extra={"file_only": True},
            )
            self._reached = 0

    def _set_up(self) -> None:
        """Open TensorBoard. Called after the first step, so that it does not delay that step."""
        if self._is_set_up:
            return
        with self.meter.paused():
            self.tensorboard.open()
            step = self.start + 1
            config = yaml.safe_dump(self.task.config.to_dict(), sort_keys=False)
            env = self.runtime.group.env
            env.call_on_rank_zero(lambda: self.tensorboard.log_text(step, "config", config))
        self._is_set_up = True

    def rollback(self, step: int) -> None:
        """Discard the metrics of the steps after `step`, which will be repeated."""
        for logger in self.loggers:
            logger.rollback(step)
        env = self.runtime.group.env
        env.call_on_rank_zero(lambda: drop_samples_after(self._directory, step))

    def log(
        self,
        step: int,
        rank_values: Mapping[str, float] = MappingProxyType({}),
        run_values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Pass values by tag to the loggers. They are not averaged over ranks here.

        Args:
            rank_values: Values of this rank. Every rank logs its own.
            run_values: Values of the whole run, which only rank zero logs.
        """
        self._set_up()
        shared = self.runtime.group.env.call_on_rank_zero(lambda: run_values) or {}
        if values := {**rank_values, **shared}:
            for logger in self.loggers:
                logger.log(step, values)

    def log_train(
        self, step: int, last: int | None, model: nn.Module, lr: float, goodput: float
    ) -> dict[str, float]:
        """Log the averages of the steps since the last call.

        This is a collective: all ranks must call it.

        Args:
            last: Last step of the run. None if it is not known.
            model: The model, wrapped for training.
            goodput: Goodput of the whole run, which rank zero logs.

        Returns:
            All metrics of this rank by tag. Empty if all steps since the last call were skipped.
        """
        measured = self.meter.read()
        if not measured:
            return {}
        metrics = {"train/lr": lr, "train/epoch": step / self.steps_per_epoch, **measured}
        strategy = self.runtime.strategy
        communication_s, exposed_s = strategy.comm_times(model)
        metrics["speed/communication_ms"] = communication_s * 1e3
        metrics["speed/communication_exposed_ms"] = exposed_s * 1e3
        metrics.update(self.utilization.metrics(measured[f"speed/{self.task.unit}_per_s"]))
        work_ms = measured.get("speed/work_ms", 0.0)
        slowest = slowest_rank(self.runtime.group, work_ms, strategy.clock.n_micro_batches)
        self.log(step, metrics, {"speed/goodput": goodput, **slowest})
        self._log_line(step, last, metrics)
        return metrics

    def _log_line(self, step: int, last: int | None, metrics: dict[str, float]) -> None:
        """Log the main metrics in one line: only to the file if the progress line shows them."""
        unit = self.task.unit
        brief = f"loss {metrics['train/loss']:.4f}, {metrics[f'speed/{unit}_per_s']:,.0f} {unit}/s"
        if "speed/mfu" in metrics:
            brief += f", MFU {metrics['speed/mfu']:.1%}"
        epoch = math.ceil(step / self.steps_per_epoch)
        epochs = "?"
        left = ""
        if last is not None:
            epochs = str(math.ceil(last / self.steps_per_epoch))
            left_s = (last - step) * metrics["speed/step_ms"] / 1e3
            left = f", {duration(left_s)} left"
        norm = metrics["train/grad_norm"]
        for name, value in own_metrics(metrics).items():
            brief += f", {name} {value:.4g}"
        self._log_lines += 1
        is_shown = step == last or is_on_console(self._log_lines)
        self.progress.set_postfix_str(brief, refresh=False)
        details = f"lr {metrics['train/lr']:.2e}, gradient norm {norm:.2f}{left}"
        log.info(
            "step %d/%s: %s, epoch %d/%s, %s",
            step,
            last or "?",
            brief,
            epoch,
            epochs,
            details,
            extra={"file_only": not (self.progress.disable and is_shown)},
        )

    def log_evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Log the metrics that the task has measured on a split, `val` or `test`."""
        self.log(step, run_values={f"{split}/{name}": value for name, value in metrics.items()})
        log.info("step %d: %s %s", step, SPLITS[split], self.task.describe(metrics))

    def log_sample(self, step: int, text: str | None) -> None:
        """Log a generated text. Ranks that did not generate it pass None.

        In a named sweep the text goes only to the job's log file. On the console, it would hide the
        lines of the other jobs.
        """
        if text is not None:
            self.tensorboard.log_text(step, "sample", text)
            append_sample(self._directory, step, text)
            in_sweep = "/" in (self.task.config.run.name or "")
            extra = {"file_only": in_sweep}
            log.info("step %d, a sample:\n%s\n", step, text, extra=extra)

    def complete(self, step: int) -> None:
        """Log that the run ends with `step`, because it is complete or was pruned."""
        env = self.runtime.group.env
        for logger in env.call_on_rank_zero(lambda: self.loggers) or []:
            logger.complete(step, self.task.config)

    def close(self) -> None:
        self.progress.close()
        self.tensorboard.close()
