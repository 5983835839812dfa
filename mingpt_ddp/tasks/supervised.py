"""Classification and regression: samples are pairs (x, y)."""

from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.tasks.task import Mean, Task


class Classification(Task):
    """Cross-entropy of model(x), logits (B, classes), with labels y (B,) int64."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        x, y = batch
        logits = model(x).float()
        correct = (logits.argmax(dim=-1) == y).sum()
        return {"loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)), "accuracy": (correct, len(y))}


class Regression(Task):
    """Mean squared error of model(x) and targets y, of the same shape."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).float(), y)
