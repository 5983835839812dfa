"""What a run tells while it trains: lines in the log, the bar, TensorBoard, metrics.jsonl."""

from __future__ import annotations

import logging
import math
import time
from datetime import timedelta

import yaml
from torch import nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.logs import Progress
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.jsonl import JSONLLogger
from mingpt_ddp.metrics.matmul_rate import MatmulUtilization
from mingpt_ddp.metrics.meters import NATS_PER_BIT, Meter, TensorBoardLogger, TrainMetrics

log = logging.getLogger(__name__)


class MetricsProcessor:
    """The journal of a run of `steps` steps, of which `done` are."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        board: TensorBoardLogger,
        history: JSONLLogger,
        utilization: MatmulUtilization,
        done: int,
        steps: int,
        begun_at: float,
    ) -> None:
        """
        Args:
            begun_at: when this start of the run began, in seconds since 1970.
        """
        self.config, self.runtime, self.steps = config, runtime, steps
        self.board, self.history, self.utilization = board, history, utilization
        self.meter = Meter(runtime, config.trainer.batch_size * config.data.block_size)
        self.progress = Progress(runtime.group.env, done, steps)
        self._done: int | None = done  # None: everything is ready
        self._begun_at: float | None = begun_at  # None: the first step is done
        history.start(done, runtime.group.world_size)

    def step_done(self) -> None:
        """One more of them."""
        self.progress.advance()
        if self._begun_at is not None:
            log.info("the first step was done after %.2f s", time.time() - self._begun_at)
            self._begun_at = None

    def _ready(self) -> None:
        """What the first step need not wait for."""
        if self._done is None:
            return
        begin = time.perf_counter()
        self.board.open()
        self.board.text(self._done + 1, "config", yaml.safe_dump(self.config.to_dict(), sort_keys=False))
        self.utilization.measure()
        self.meter.pause(time.perf_counter() - begin)
        self._done = None

    def go_back(self, step: int) -> None:
        """What was told of the steps after `step` will be told anew."""
        self.board.go_back(step + 1)
        self.history.go_back(step)

    def log_train(self, step: int, lr: float, model: nn.Module, goodput: float) -> TrainMetrics | None:
        """Of the steps since the last time; None where all of them were left out. A collective."""
        if self.meter.is_empty:
            return None
        readings = self.meter.read()
        self._ready()
        mfu = self.utilization.share(readings.tokens_per_s / self.runtime.group.world_size)
        communication, exposed = self.runtime.comm_times(model)
        self.board.scalars(
            step,
            {
                "train/loss": readings.loss,
                "train/lr": lr,
                "train/grad_norm": readings.grad_norm,
                "speed/tokens_per_s": readings.tokens_per_s,
                "speed/step_ms": readings.step_s * 1e3,
                "speed/data_ms": readings.data_time_s * 1e3,
                "speed/communication_ms": communication * 1e3,
                "speed/communication_exposed_ms": exposed * 1e3,
                "memory/peak_mib": readings.peak_memory / 2**20,
                **({} if mfu is None else {"speed/mfu": mfu}),
            },
        )
        self.board.results(step, {"speed/goodput": goodput})
        self.history.trained(step, readings.loss, lr, readings.grad_norm, readings.tokens_per_s, mfu)
        left = timedelta(seconds=round(min((self.steps - step) * readings.step_s, 1e9)))
        brief = f"loss {readings.loss:.4f}, {readings.tokens_per_s:,.0f} tokens/s"
        brief += "" if mfu is None else f", MFU {mfu:.1%}"
        self.progress.describe(brief)
        log.info(
            "step %d/%d: %s, lr %.2e, gradient norm %.2f, %s left",
            *(step, self.steps, brief, lr, readings.grad_norm, left),
            extra={"file_only": self.progress.shown},
        )
        return readings

    def log_validation(self, step: int, loss: float) -> None:
        self._ready()
        self.board.results(step, {"val/loss": loss, "val/bits_per_char": loss / NATS_PER_BIT})
        self.history.evaluated(step, loss)
        log.info("step %d: validation loss %.4f nats (%.4f bits) per character", step, loss, loss / NATS_PER_BIT)

    def log_sample(self, step: int, text: str | None) -> None:
        """
        Args:
            text: None on the ranks that have none.
        """
        if text is not None:
            self.board.text(step, "sample", text)
            log.info("step %d, a sample:\n%s\n", step, text)

    def complete(self, step: int, val_loss: float | None) -> None:
        """The run goes no further than `step`."""
        self.board.hparams(self.config.to_dict(), {"hparam/val_loss": val_loss or math.nan})
        self.history.complete(step)

    def close(self) -> None:
        self.progress.close()
        self.board.close()
