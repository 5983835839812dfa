"""The API for your own training loop. See examples/train.py and docs/python.md."""

from mingpt_ddp.cli.own_script import resolve
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch, plan_batches
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import read_env
from mingpt_ddp.process.root_cause import process_exit
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.evaluation.evaluator import Evaluator
from mingpt_ddp.training.run_log import RunLog
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Trainable, build_trainable

__all__ = [
    "BatchPlan",
    "Config",
    "Evaluator",
    "MicroBatch",
    "RunLog",
    "Runtime",
    "TrainState",
    "TrainStep",
    "Trainable",
    "build_task",
    "build_trainable",
    "from_mapping",
    "plan_batches",
    "process_exit",
    "read_env",
    "resolve",
]
