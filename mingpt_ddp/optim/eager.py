"""torch's optimizers, without the import of torch's compiler.

torch hides some methods of an optimizer from torch.compile. At the first call of such a method, it
imports torch._dynamo, which takes about half a second. This package compiles models, but not
optimizers, so these classes call the methods that torch has wrapped.
"""

from inspect import unwrap
from typing import Any

import torch
from torch.optim import Optimizer


class Eager(Optimizer):
    """An optimizer that is never compiled."""

    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)
    zero_grad = unwrap(Optimizer.zero_grad)


class AdamW(Eager, torch.optim.AdamW):
    """torch.optim.AdamW, which is never compiled."""

    _adamw_step = unwrap(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self._adamw_step(closure)


class SGD(Eager, torch.optim.SGD):
    """torch.optim.SGD, which is never compiled."""

    _sgd_step = unwrap(torch.optim.SGD.step)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self._sgd_step(closure)
