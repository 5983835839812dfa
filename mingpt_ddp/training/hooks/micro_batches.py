"""The gradients of each micro-batch, before they are averaged over micro-batches and ranks."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.errors import CodeError

# The measurements of one micro-batch, from the method `micro_batch` of a hook: numbers and nested
# lists by name.
Measured = dict[str, Any]


class PassGradients:
    """Holds the gradients of a single backward pass.

    It reads the gradients without changing them. Autograd still adds up the gradients of several
    passes in the usual order, so the sums have the same bits as without this class.
    """

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self.model = model
        self._gradients: dict[str, Tensor] = {}
        strategy.watch_gradients(model, self._take)

    def _take(self, name: str, gradient: Tensor) -> None:
        # A reentrant checkpoint computes a gradient in several parts.
        if name in self._gradients:
            gradient = self._gradients[name] + gradient
        self._gradients[name] = gradient

    def clear(self) -> None:
        """Drop the gradients, so that the next backward pass begins without any."""
        self._gradients.clear()

    def divided_by(self, scale: Tensor) -> dict[str, Tensor]:
        """Return the gradients divided by a number, as new tensors by name of the parameter."""
        return {name: g / scale.to(g.device) for name, g in self._gradients.items()}


def as_numbers(measured: Any, label: str) -> Measured:
    """Return the tensors that a hook has measured as numbers and nested lists.

    Args:
        measured: The value that the method `micro_batch` of the hook has returned.
        label: Name of the hook in error messages.

    Raises:
        CodeError: The hook has not returned a dictionary of tensors or numbers.
    """
    try:
        return {
            str(name): torch.as_tensor(value, dtype=torch.float64).tolist()
            for name, value in measured.items()
        }
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CodeError(
            f"{label}: micro_batch must return a dictionary of tensors or numbers: {error}"
        ) from error


def stack(by_rank: Sequence[Sequence[Measured]], label: str) -> dict[str, Tensor]:
    """Stack the measurements of all micro-batches, in the order of the micro-batches.

    Args:
        by_rank: The measurements of each rank. Micro-batch j has run on rank j mod world size.
        label: Name of the hook in error messages.

    Returns:
        A tensor (n_micro, ...) for each name.

    Raises:
        CodeError: Names or shapes differ between micro-batches.
    """
    rounds = itertools.zip_longest(*by_rank)
    rows = [row for row in itertools.chain.from_iterable(rounds) if row is not None]
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return {
            name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in names
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CodeError(
            f"{label}: micro_batch must return the same names and shapes for every micro-batch: "
            f"{error}"
        ) from error
