"""Build a model on torch's meta device, where tensors have shapes and types but no values."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions that fill a tensor, and return it. Those of nn.init end with an underscore.
FILLS = {Tensor.normal_, Tensor.uniform_}
FILLS |= {getattr(nn.init, name) for name in dir(nn.init) if re.fullmatch(r"[a-z].*_", name)}


class _FillNothing(TorchFunctionMode):
    """Leave out the initialization of weights."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def meta_device() -> Iterator[None]:
    """Create the tensors in this context on the meta device.

    Functions that fill tensors do nothing. There, the meta device would use Python code of torch
    that takes half a second to import.
    """
    with torch.device("meta"), _FillNothing():
        yield
