"""What a run trains: the model, its optimizer, the average of its weights, hooks with state."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.models import apply_activation_checkpointing, count_parameters
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluation.weight_average import WeightAverage
from mingpt_ddp.training.hooks.actions import Actions


@dataclass(frozen=True)
class Trainable:
    """What the train step changes and a snapshot holds."""

    model: nn.Module  # prepared by the strategy, not wrapped
    optimizer: Optimizer
    average: WeightAverage
    parameters: int  # a number: those of the whole model, on however many ranks
    actions: Actions

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a snapshot by kind and name."""
        return {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.optimizer),
            **self.average.state(),
            **self.actions.tensors(),
        }


def build_trainable(
    runtime: Runtime, task: Task, initialize: Callable[[nn.Module], None] | None = None
) -> Trainable:
    """Build the model with weights drawn from the seed, and its optimizer. A collective.

    Args:
        initialize: replaces weights of the new model, before the strategy divides it.
    """
    config = task.config
    seed_everything("weights", config.run.seed)
    model = task.build_model()
    if initialize is not None:
        initialize(model)
    if config.trainer.activation_checkpointing:
        apply_activation_checkpointing(model)
    parameters = count_parameters(model)
    model = runtime.strategy.prepare(model)
    optimizer = build_optimizer(model, config.optimizer)
    runtime.strategy.configure(optimizer)
    average = WeightAverage(model, config.trainer.ema)
    return Trainable(model, optimizer, average, parameters, Actions(runtime))
