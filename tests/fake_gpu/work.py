"""Build the parts of a run on a fake rank, and take its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from tasks import text_task
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.training import train_step, trainer
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.trainable import Trainable, build_trainable

STEPS_OF_TEXT = 4  # steps in an epoch


def build_task(config: Config, vocab_size: int) -> LanguageModel:
    """Return a task with a text of zeros that is long enough for a few steps."""
    windows = config.trainer.batch_size * STEPS_OF_TEXT + 1
    dtype = np.uint8 if vocab_size <= 256 else np.uint16
    text = np.zeros(windows * config.data.block_size + 1, dtype)
    task = text_task(config, val=text[: 3 * config.data.block_size], vocab_size=vocab_size)
    task.dataset.train = text
    task.dataset.check_lengths = lambda block_size: None
    return task


@dataclass(frozen=True)
class FakeRun:
    """The parts of a run on one fake rank."""

    runtime: Runtime
    task: LanguageModel
    trainable: Trainable
    trainer: trainer.Trainer

    @property
    def meter(self) -> Meter:
        return self.trainer.metrics.meter


def build_run(config: Config, runtime: Runtime, vocab_size: int) -> FakeRun:
    """Build the model, the optimizer and the task of a run, and do the warm-up passes."""
    task = build_task(config, vocab_size)
    task.group = runtime.group
    trainable = build_trainable(runtime, task)
    loader = task.train_loader(runtime.device)
    plan = plan_batches(config, runtime.group.data_size)
    step = train_step.TrainStep(runtime, task, loader, plan, trainable)
    step.warm_up()
    meter = Meter(runtime, loader.items_per_step, task.unit)
    return FakeRun(runtime, task, trainable, trainer_of(config, runtime, trainable, step, meter))


def trainer_of(
    config: Config, runtime: Runtime, trainable: Trainable, step: train_step.TrainStep, meter: Meter
) -> trainer.Trainer:
    """Return a training loop without interrupts and snapshots."""
    run: Any = SimpleNamespace(
        config=config,
        runtime=runtime,
        directory=Path("run"),
        trainable=trainable,
        state=TrainState(),
    )
    observers: Any = SimpleNamespace(signals=SimpleNamespace(signal_name=None))
    saves: Any = SimpleNamespace(
        manager=SimpleNamespace(save_in_progress=False),
        is_due=lambda: False,
        anomaly=AnomalyPolicy(run),
        wait_for_staging=lambda: None,
    )
    unused: Any = None
    recorder = mock.MagicMock(metrics=mock.MagicMock(meter=meter), saves=saves)
    return trainer.Trainer(run, step, recorder, unused, observers)


def step(run: FakeRun, number: int) -> None:
    """Take a step. Check that its losses and all tensors are on the GPUs of the rank."""
    record = run.meter.record

    def check(losses: dict[str, Tensor], grad_norm: Tensor, fetch_s: float) -> None:
        for tensor in (grad_norm, *losses.values()):
            assert tensor.device == run.runtime.device, "the losses and the norm of a step"
        record(losses, grad_norm, fetch_s)

    with mock.patch.object(run.meter, "record", check):
        run.trainer._train(number)
    gpus = {parameter.device for parameter in run.trainable.model.parameters()}
    is_muon = isinstance(run.trainable.optimizer, Muon)
    for kind, tensors in run.trainable.tensors().items():
        for name, tensor in tensors.items():
            # Muon keeps a step for each matrix only because AdamW's loader expects one.
            is_unused = is_muon and name.endswith(":step")
            is_own = tensor.device in gpus
            assert is_own or is_unused, f"{kind} {name} is on {tensor.device}"
