"""Classification and regression: samples are pairs (x, y)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.tasks.task import Mean, Task


def _check_target(task: Task, fits: Callable[[Tensor], bool], needed: str) -> None:
    """Refuse a dataset whose samples are of another task."""
    sample = task.datasets.val[0]
    try:
        _, y = sample
        target = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        target = torch.empty(0)
    if fits(target):
        return
    name = task.config.task.name
    label = task.config.data.label
    raise ConfigError(
        f"task={name} needs samples (x, y) with {needed} as y, but {label} has others; "
        "choose another task, or register one of your own"
    )


def _is_whole_number(y: Tensor) -> bool:
    return y.dim() == 0 and not y.is_floating_point()


class Classification(Task):
    """Cross-entropy of model(x), logits (B, classes), with labels y (B,) int64."""

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        super().__init__(config, group)
        _check_target(self, _is_whole_number, "a whole number")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        logits = model(x).float()  # (B, classes)
        smoothing = getattr(self.config.task, "label_smoothing", 0.0)
        return F.cross_entropy(logits, y, label_smoothing=smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        x, y = batch
        n = len(y)
        logits = model(x).float()  # (B, classes)
        total_loss = F.cross_entropy(logits, y, reduction="sum")
        correct = (logits.argmax(dim=-1) == y).sum()
        return {"loss": (total_loss, n), "accuracy": (correct, n)}


class Regression(Task):
    """Mean squared error of model(x) and targets y, of the same shape."""

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        super().__init__(config, group)
        _check_target(self, Tensor.is_floating_point, "floating-point numbers")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        prediction = model(x).float()
        return F.mse_loss(prediction, y)
