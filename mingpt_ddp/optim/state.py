"""The state that an optimizer keeps for each parameter, as its class declares it.

A declaration is a function (parameter, group). It returns the state of a parameter of this group
after a step: tensors or numbers, by name. It runs on the meta device, where a tensor has a shape
and a type but takes no memory.

Declarations have two uses. A snapshot with any other state is refused before a kernel uses it. And
the command `plan`, which estimates the memory of a run, counts the bytes of the state. An optimizer
without a declaration can train too. Then nothing checks its state, and `plan` measures its memory.

Strategies that shard a parameter over ranks shard a state of the same shape in the same way. State
of any other shape is whole on each rank that keeps it.
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
    """Decorate the function that declares the state of an optimizer class.

    The declaration does not apply to subclasses.
    """

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
