"""What a fake rank does: it builds what a run trains, and takes the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tasks import text_task

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Trainable, build_trainable

STEPS_OF_TEXT = 4  # steps in an epoch


def build_task(config: Config, vocab_size: int) -> LanguageModel:
    """Return a task with a text of zeros, as long as a few steps need."""
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
    train_step: TrainStep


def build_run(config: Config, runtime: Runtime, vocab_size: int) -> FakeRun:
    """Build what the run trains, and take its warm-up passes."""
    task = build_task(config, vocab_size)
    trainable = build_trainable(runtime, task)
    loader = task.train_loader(runtime.device)
    plan = plan_batches(config, runtime.group.data_size)
    train_step = TrainStep(runtime, task, loader, plan, trainable)
    train_step.warm_up()
    return FakeRun(runtime, task, trainable, train_step)
