"""The values that `Task.loss` returns in training: losses, and metrics to log with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import CodeError

Mean: TypeAlias = tuple[Tensor | float, Tensor | int]  # a sum, and the number of items in it
# The mean loss of a batch, or several losses by name, whose sum is trained.
Losses: TypeAlias = Tensor | Mapping[str, Tensor]
Metrics: TypeAlias = Mapping[str, Tensor | float | Mean]  # a scalar counts as one item
Returned: TypeAlias = Losses | tuple[Losses, Metrics]

# Each metric is a sum and a count. The ranks add up the sums under the name SUM + metric, and the
# counts under COUNT + metric.
SUM = "sum/"
COUNT = "count/"
RESERVED_NAMES = ("loss", "lr", "epoch", "grad_norm")  # every run logs these as train/<name>


@runtime_checkable
class SupportsStepMetrics(Protocol):
    """An optional method of a model. The run logs the metrics that it returns."""

    def step_metrics(self) -> Metrics:
        """Return metrics of the latest forward pass, by name.

        Each is a scalar, or a pair of a sum and the number of items in it.
        """


@dataclass(frozen=True)
class Outputs:
    """The losses and the metrics of a micro-batch."""

    # The total loss is called `loss`. If there are several losses, each is called `loss_<name>`.
    losses: dict[str, Tensor]
    metrics: dict[str, Mean]

    def shares(self, divisor: int, copies: int) -> dict[str, Tensor]:
        """Return this micro-batch's share of each sum that the ranks add up in a step.

        Args:
            divisor: The number of micro-batches whose shares add up to a mean loss.
            copies: The number of ranks that compute the same metrics.
        """
        shares = {name: loss.detach() / divisor for name, loss in self.losses.items()}
        device = self.losses["loss"].device
        for name, (total, count) in self.metrics.items():
            shares[SUM + name] = _scalar(total, device) / copies
            shares[COUNT + name] = _scalar(count, device) / copies
        return shares


def outputs_of(returned: Returned, model: nn.Module | None = None) -> Outputs:
    """Convert the return value of `Task.loss`, and add the metrics of the model's `step_metrics`.

    Args:
        returned: The value that `Task.loss` has returned.
        model: The model, which may have a method `step_metrics`. None to leave its metrics out.

    Raises:
        CodeError: The metrics are not a dictionary, or `step_metrics` is not a method.
    """
    pair = returned if isinstance(returned, tuple) else (returned, {})
    if len(pair) != 2:
        raise CodeError(
            "loss(model, batch) must return the loss or losses, or a pair of them and a dictionary "
            f"of metrics, not {len(pair)} values"
        )
    losses, metrics = pair
    means = as_means(metrics, "loss(model, batch)")
    if isinstance(model, SupportsStepMetrics):
        if not callable(model.step_metrics):
            raise CodeError("step_metrics must be a method of the model that returns its metrics")
        means |= as_means(model.step_metrics(), "step_metrics()")
    return Outputs(named_losses(losses), means)


def as_means(metrics: Metrics, source: str) -> dict[str, Mean]:
    """Return each metric as a sum and a number of items. A scalar is one item.

    Args:
        source: The function that has returned the metrics, for the error message.

    Raises:
        CodeError: The metrics are not a dictionary.
    """
    if not isinstance(metrics, Mapping):
        raise CodeError(
            f"{source} must return a dictionary of metrics, not {_shape_or_type(metrics)}"
        )
    means = {}
    for name, value in metrics.items():
        means[name] = value if isinstance(value, tuple) else (value, 1)
    return means


def named_losses(losses: Losses) -> dict[str, Tensor]:
    """Return the total as `loss`, and each of several losses as `loss_<name>`."""
    if not isinstance(losses, Mapping):
        return {"loss": losses}
    parts = {f"loss_{name}": loss for name, loss in losses.items()}
    if not parts or not all(map(_is_loss, parts.values())):
        # No losses, or a loss that is not a scalar tensor. `check_outputs` refuses them.
        return {**parts, "loss": losses}  # type: ignore[dict-item]
    return {"loss": torch.stack([*parts.values()]).sum(), **parts}


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a tensor in fp64, without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def check_outputs(owner: str, outputs: Outputs) -> None:
    """Refuse losses and metrics that cannot be averaged.

    Args:
        owner: The task, model, hook or step that the error message begins with.

    Raises:
        CodeError: A loss is not a scalar tensor, or a metric has an invalid name or value. The
            message names it.
    """
    for name, loss in outputs.losses.items():
        if not _is_loss(loss):
            raise CodeError(
                f"{owner}: loss(model, batch) must return scalar tensors, not "
                f"{_shape_or_type(loss)} as {name}"
            )
    for name, mean in outputs.metrics.items():
        if not _is_valid_name(name):
            raise CodeError(
                f"{owner}: a metric cannot have the name {name!r}; choose a name without a slash, "
                "which is not loss, lr, epoch or grad_norm and does not begin with loss_"
            )
        if not is_pair(mean):
            actual = " and ".join(map(_shape_or_type, mean))
            raise CodeError(
                f"{owner}: the metric {name} must be a scalar, or a pair of a sum and a number of "
                f"items, not {actual}"
            )


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == ()


def _is_valid_name(name: Any) -> bool:
    """Return True if a metric may have this name.

    A name must not contain a slash. metrics.jsonl writes a slash as an underscore, so that a/b and
    a_b would be the same metric there.
    """
    if not isinstance(name, str) or name in RESERVED_NAMES or name.startswith("loss_"):
        return False
    return name != "" and name.isprintable() and "/" not in name


def is_pair(value: Any) -> bool:
    """Return True for a pair of a sum and a number of items, each a number or a scalar tensor."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_scalar, value))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.shape == () and not value.is_complex()
    if not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:  # a huge integer
        return False
    return True


def _shape_or_type(value: Any) -> str:
    """Return the shape of a tensor, or the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
