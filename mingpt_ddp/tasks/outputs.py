"""What a task's `loss` returns in training: losses, and metrics to log with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import CodeError

Mean: TypeAlias = tuple[Tensor | float, Tensor | int]  # a sum, and the number of items in it
Losses: TypeAlias = Tensor | Mapping[str, Tensor]  # the mean loss, or several whose sum is trained
Metrics: TypeAlias = Mapping[str, Tensor | float | Mean]  # a scalar counts as one item
Returned: TypeAlias = Losses | tuple[Losses, Metrics]

# Prefixes of what the ranks add up for a metric.
SUM = "sum/"
COUNT = "count/"
TAKEN = ("loss", "lr", "epoch", "grad_norm")  # logged as train/<name> of every run


@runtime_checkable
class SupportsStepMetrics(Protocol):
    """Optional for a model: metrics of its latest forward pass, to be logged."""

    def step_metrics(self) -> Metrics:
        """Return scalars, or pairs of a sum and the number of items in it, by name."""


@dataclass(frozen=True)
class Outputs:
    """The losses and the metrics of a micro-batch."""

    losses: dict[str, Tensor]  # the total as `loss`, and each of several as `loss_<name>`
    metrics: dict[str, Mean]

    def shares(self, divisor: int, copies: int) -> dict[str, Tensor]:
        """Return a micro-batch's shares of what the ranks add up in a step.

        Args:
            divisor: how many shares make up a mean loss.
            copies: ranks that compute the same metrics.
        """
        shares = {name: loss.detach() / divisor for name, loss in self.losses.items()}
        device = self.losses["loss"].device
        for name, (total, count) in self.metrics.items():
            shares[SUM + name] = _scalar(total, device) / copies
            shares[COUNT + name] = _scalar(count, device) / copies
        return shares


def outputs_of(returned: Returned, model: nn.Module | None = None) -> Outputs:
    """Return what `Task.loss` has returned, with the metrics of the model if it has some.

    Raises:
        CodeError: one of them has returned no dictionary of metrics, or `step_metrics` is no
            method.
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
    """Return each metric with its number of items, which is 1 of a scalar.

    Args:
        source: what has returned them, for the message.

    Raises:
        CodeError: they are no dictionary.
    """
    if not isinstance(metrics, Mapping):
        raise CodeError(f"{source} must return a dictionary of metrics, not {_kind(metrics)}")
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
        return {**parts, "loss": losses}  # type: ignore[dict-item]  # which is refused
    return {"loss": torch.stack([*parts.values()]).sum(), **parts}


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a tensor in fp64, without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def check_outputs(owner: str, outputs: Outputs) -> None:
    """Refuse losses and metrics that cannot be averaged.

    Args:
        owner: the task or the model, for the message.

    Raises:
        CodeError: names the loss or the metric.
    """
    for name, loss in outputs.losses.items():
        if not _is_loss(loss):
            raise CodeError(
                f"{owner}: loss(model, batch) must return scalar tensors, not {_kind(loss)} as "
                f"{name}"
            )
    for name, mean in outputs.metrics.items():
        if not _is_free(name):
            raise CodeError(f"{owner}: a metric cannot have the name {name!r}; choose another")
        if not is_pair(mean):
            kinds = " and ".join(map(_kind, mean))
            raise CodeError(
                f"{owner}: the metric {name} must be a scalar, or a pair of a sum and a number of "
                f"items, not {kinds}"
            )


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == ()


def _is_free(name: Any) -> bool:
    """Return whether a metric may have this name.

    Without a slash, which is an underscore in metrics.jsonl: a/b and a_b would be one.
    """
    if not isinstance(name, str) or name in TAKEN or name.startswith("loss_"):
        return False
    return name != "" and name.isprintable() and "/" not in name


def is_pair(value: Any) -> bool:
    """Return whether a value is a sum and a number of items, each a number or a scalar tensor."""
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


def _kind(value: Any) -> str:
    """Return the shape of a tensor, or the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
