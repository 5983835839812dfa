"""torch's optimizers, without the import of torch's compiler.

torch wraps some methods of an optimizer so that torch.compile skips them. The first call of a
wrapped method imports torch._dynamo, which takes about half a second. This package compiles models,
but not optimizers, so these classes have the methods without the wrappers.
"""

from inspect import unwrap

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

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(Eager, torch.optim.SGD):
    """torch.optim.SGD, which is never compiled."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))
