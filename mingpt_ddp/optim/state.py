"""The state that an optimizer keeps for each parameter, as its class declares it.

A declaration is a function (parameter, group) that returns the state of a parameter of this group
after a step: tensors or numbers, by name. It runs on the meta device, where a tensor has a shape
and a type but takes no memory. A snapshot with other state is refused before a kernel uses it, and
a plan counts the bytes. An optimizer without a declaration trains too: nothing checks its state,
and a plan measures it.

Strategies that split a parameter over ranks split the state of the same shape alike. Any other
state is whole on each rank that keeps it.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

State: TypeAlias = Mapping[str, Tensor | float]  # the state of one parameter, by name
Declaration: TypeAlias = Callable[[Tensor, dict[str, Any]], State]

DECLARATIONS: dict[type[Optimizer], Declaration] = {}


def declare_state(optimizer: type[Optimizer]) -> Callable[[Declaration], Declaration]:
    """Declare the state of an optimizer class, but not of its subclasses, as a decorator."""

    def add(declaration: Declaration) -> Declaration:
        DECLARATIONS[optimizer] = declaration
        return declaration

    return add


def declared_state(optimizer: Optimizer) -> dict[Tensor, State] | None:
    """Return the declared state of each parameter. None if the class has no declaration."""
    declaration = DECLARATIONS.get(type(optimizer))
    if declaration is None:
        return None
    states: dict[Tensor, State] = {}
    with torch.device("meta"):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                like = torch.empty(parameter.shape, dtype=parameter.dtype)
                states[parameter] = declaration(like, group)
    return states
