"""Classification and regression: samples are pairs (x, y)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.tasks.task import Mean, Task


def _check_target(task: Task, fits: Callable[[Tensor], bool], needed: str) -> None:
    """Refuse a dataset whose samples are of another task."""
    sample = task.datasets.val[0]
    try:
        _, y = sample
        found = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if not fits(found):
        config = task.config
        raise ConfigError(
            f"task={config.task.name} needs samples (x, y) with {needed} as y, but "
            f"{config.data.label} has others; "
            "choose another task, or register one of your own"
        )


class Classification(Task):
    """Cross-entropy of model(x), logits (B, classes), with labels y (B,) int64."""

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        super().__init__(config, group)
        _check_target(self, lambda y: y.dim() == 0 and not y.is_floating_point(), "a whole number")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        smoothing = getattr(self.config.task, "label_smoothing", 0.0)
        return F.cross_entropy(model(x).float(), y, label_smoothing=smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        x, y = batch
        logits = model(x).float()
        correct = (logits.argmax(dim=-1) == y).sum()
        return {
            "loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)),
            "accuracy": (correct, len(y)),
        }


class Regression(Task):
    """Mean squared error of model(x) and targets y, of the same shape."""

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        super().__init__(config, group)
        _check_target(self, Tensor.is_floating_point, "floating-point numbers")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).float(), y)
