"""The objects that all parts of a run share. Training changes the objects in `Trainable`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import Loader
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import apply_activation_checkpointing, count_parameters
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluation.weight_average import WeightAverage
from mingpt_ddp.training.hooks.actions import Actions
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.train_state import TrainState


@dataclass(frozen=True)
class Trainable:
    """The objects that a train step changes and a snapshot saves."""

    model: nn.Module  # the model after `strategy.prepare`, without its wrapper
    optimizer: Optimizer
    average: WeightAverage  # moving average of the weights
    n_parameters: int  # number of parameters of the whole model, on all ranks together
    actions: Actions  # the hooks that act on the run, which may have state

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a snapshot by kind (model, optimizer, ema, hooks) and name.

        Raises:
            CodeError: The state of a hook cannot be saved, or it is a weight or gradient itself.
        """
        return {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.optimizer),
            **self.average.state(),
            **self.actions.tensors(self.model),
        }


@dataclass(frozen=True)
class Run:
    """A run that has started, with the objects that all parts of its training share."""

    runtime: Runtime
    task: Task
    loader: Loader
    directory: Path
    trainable: Trainable
    length: RunLength  # number of steps; also holds the train state
    snapshots: SnapshotManager
    resumed: dict[str, Any]  # the state.json that the run resumes from; {} for a new run
    # Record of the code that trains the run, or has trained it. {} on ranks other than zero.
    code: dict[str, Any]
    is_complete: bool  # True if there is nothing left to train

    @property
    def config(self) -> Config:
        """The whole configuration. It includes values taken from a snapshot or initial weights."""
        return self.task.config

    @property
    def state(self) -> TrainState:
        """The train state. It stays the same object: a rollback changes it in place."""
        return self.length.state


def build_trainable(
    runtime: Runtime, task: Task, initialize: Callable[[nn.Module], None] | None = None
) -> Trainable:
    """Build the model with weights drawn from the seed, and its optimizer. A collective.

    Args:
        runtime: The runtime of this rank.
        task: The task, which builds the model.
        initialize: Replaces weights of the new model, before the strategy shards it. None to train
            from random weights.
    """
    config = task.config
    seed_everything("weights", config.run.seed)
    model = task.build_model()
    if initialize is not None:
        initialize(model)
    if config.trainer.activation_checkpointing:
        apply_activation_checkpointing(model)
    n_parameters = count_parameters(model)
    model = runtime.strategy.prepare(model, runtime.dtype)
    optimizer = build_optimizer(model, config.optimizer)
    runtime.strategy.configure(optimizer)
    average = WeightAverage(model, config.trainer.ema)
    return Trainable(model, optimizer, average, n_parameters, Actions(config, runtime))
