"""Replace torch.cuda by a fake H100, which knows only the shapes, types and devices of tensors.

It is based on FakeTensorMode. Load the guard (guard.py) before this module imports torch.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from fake_gpu import guard
from mingpt_ddp.snapshots import staging_buffer

GPUS = 8  # GPUs of a node
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 << 30,
    major=9,
    minor=0,
    multi_processor_count=132,
    uuid="GPU-0",
)


# Called when the host waits for the GPU in a way that torch's dispatch modes do not see.
listeners: list[Callable[[str], None]] = []


def _wait(what: str) -> None:
    for listener in listeners:
        listener(what)


class Event:
    """An event that a stream records. It has always happened already."""

    def __init__(self, **options: Any) -> None: ...

    def record(self, *stream: Any) -> None: ...

    def synchronize(self) -> None:
        _wait("wait for an event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Stream:
    """A stream that never has kernels to run."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = device

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: "Stream") -> None: ...

    def synchronize(self) -> None:
        _wait("wait for a stream")


class Graph:
    """A CUDA graph whose replay writes nothing."""

    def replay(self) -> None: ...


def _set_device(device: Any) -> None:
    guard.load().set_device(torch.device(device).index)


def _nothing(*args: Any, **options: Any) -> None: ...


def _current_stream(device: Any = None) -> Stream:
    return Stream(device)


CUDA: dict[str, Any] = {
    "CUDAGraph": Graph,
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": _nothing,
    "current_device": lambda: guard.load().current_device(),
    "current_stream": _current_stream,
    "device_count": lambda: GPUS,
    "empty_cache": _nothing,
    "get_device_capability": lambda device=None: (H100.major, H100.minor),
    "get_device_name": lambda device=None: H100.name,
    "get_device_properties": lambda device=None: H100,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "graph": lambda graph, **options: contextlib.nullcontext(),
    "init": _nothing,
    "is_available": lambda: True,
    "is_bf16_supported": lambda **options: True,
    "is_initialized": lambda: True,
    "manual_seed_all": _nothing,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": _nothing,
    "set_device": _set_device,
    "set_rng_state": _nothing,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": lambda device=None: _wait("wait for the GPU"),
}

pinned: Any = WeakIdKeyDictionary()  # the storages that are pinned host memory


def pin(tensor: Tensor) -> Tensor:
    """Mark the memory of a host tensor as pinned. Return the tensor."""
    pinned[tensor.untyped_storage()] = True
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage() in pinned


def _set_data(tensor: Tensor, new: Tensor) -> None:
    """Assign `tensor.data`. For fake tensors, torch copies the shape and type, not the device."""
    torch._C.TensorBase.data.__set__(tensor, new)
    if isinstance(tensor, FakeTensor) and isinstance(new, FakeTensor):
        tensor.fake_device = new.fake_device


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Convert parameters and buffers in place. For fake tensors, nn.Module would swap them."""
    for child in module.modules():
        with torch.no_grad():
            for parameter in child._parameters.values():
                if parameter is not None:
                    parameter.data = function(parameter)
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = function(buffer)
    return module


def _numpy(tensor: Tensor, **options: Any) -> np.ndarray:
    """Return zeros, since a fake tensor has no values."""
    if not isinstance(tensor, FakeTensor):
        return torch._C.TensorBase.numpy(tensor, **options)
    assert tensor.device.type == "cpu", "a tensor of the GPU as an array"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))


def _to_list(tensor: Tensor) -> Any:
    """Return zeros. Copy the tensor to the host first, as torch does, so that observers see it."""
    return _numpy(tensor.cpu()).tolist()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Choose a fused kernel as a GPU does. A build without CUDA has only the composed function."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if attn_mask is None and q.dtype != torch.float32:
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        return fused(q, k, v, dropout_p, is_causal)[0]
    bias = None
    if attn_mask is not None:
        shape = (*q.shape[:-1], k.shape[-2])
        bias = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device).expand(shape)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(q, k, v, bias, q.requires_grad, dropout_p, is_causal)[0]


class Reduced(list[Tensor]):
    """The result of an all-reduce. A future must not look for fake tensors in it."""

    is_set = False


def _extract_tensors(value: Any) -> list[Tensor]:
    """Hide fake tensors while a future is set, which refuses them. DDP reads them later."""
    return list(value) if isinstance(value, Reduced) and value.is_set else []


def all_reduce(tensors: list[Tensor], *options: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors and a completed Work whose future holds them.

    Communication hooks of DDP read this future, which torch's fake process group leaves empty.
    """
    result = Reduced(tensors)
    future: Any = torch.futures.Future()
    future.set_result(result)
    result.is_set = True
    return tensors, Work.boxed(_create_work_from_future(future))


class FakeHost(FakeTensorMode):
    """A FakeTensorMode that accepts real host tensors and shows observers how tensors are made."""

    # `torch.tensor(1, device="cuda")` makes a tensor on the host. Observers see its copy to the
    # GPU.
    avoid_device_init = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.c10d.allreduce_.default and args[0][0].device.type == "cuda":
            return all_reduce(*args)
        if func is torch.ops.aten.exponential_.default:
            return args[0]  # the fake kernel does not accept a generator
        is_pinned = bool(kwargs and kwargs.pop("pin_memory", False))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return pin(result) if is_pinned else result


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeHost]:
    """Let torch see eight GPUs. Inside the yielded mode, all tensors are fake.

    Make host tensors that torch itself computes with, such as those of device meshes, outside that
    mode.
    """
    # This function caches a walk through torch's modules, so it must come before the replacements.
    get_torch_obj_rule_map()
    mode = FakeHost()

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        is_fake = isinstance(tensor, FakeTensor)
        return pin(tensor.clone() if is_fake else mode.from_tensor(tensor))

    def page_lock(memory: Tensor) -> Callable[..., object]:
        pin(memory)
        return _nothing

    replacements = (
        *((torch.cuda, name, value) for name, value in CUDA.items()),
        (FakeTensor, "tolist", _to_list),
        (nn.Module, "_apply", _apply),
        (nn.functional, "scaled_dot_product_attention", attention),
        (torch.Tensor, "data", property(torch._C.TensorBase.data.__get__, _set_data)),
        (torch.Tensor, "numpy", _numpy),
        (torch.Tensor, "pin_memory", pin_memory),
        (staging_buffer, "page_lock", page_lock),
        (torch._jit_internal, "_extract_tensors", _extract_tensors),
    )
    with contextlib.ExitStack() as stack:
        for target, name, value in replacements:
            stack.enter_context(mock.patch.object(target, name, value))
        yield mode
