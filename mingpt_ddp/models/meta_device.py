"""Build a model on torch's meta device, where tensors have shapes and types but no values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The functions that fill a tensor with random numbers, and return it. Others of nn.init call these.
FILLS = {
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.kaiming_uniform_,
    nn.init.normal_,
    nn.init.uniform_,
}


class _FillNothing(TorchFunctionMode):
    """Leave out the initialization of meta tensors."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in FILLS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Create the tensors in this context on the meta device, and do not initialize them.

    On the meta device, functions such as nn.init.normal_ would import Python code of torch, which
    takes half a second.
    """
    with torch.device("meta"), _FillNothing():
        yield
