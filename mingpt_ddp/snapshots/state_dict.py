"""Between live objects and named tensors: what of a model and an optimizer is saved, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.snapshots.buffer import NAMES

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}  # how plain numbers of an optimizer are kept


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, and copies of its buffers: a forward pass may already change those."""
    buffers = {name for name, _ in model.named_buffers()}
    state = model.state_dict()
    return {name: tensor.clone() if name in buffers else tensor for name, tensor in state.items()}


def load_model_state(model: nn.Module, tensors: dict[str, Tensor], assign: bool = False) -> None:
    """
    Args:
        assign: take the tensors themselves instead of their values.

    Raises:
        SnapshotError: other names or shapes.
    """
    own = model.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong = wrong or [k for k in own if (own[k].shape, own[k].dtype) != (tensors[k].shape, tensors[k].dtype)]
    if wrong:
        raise SnapshotError(f"the snapshot's weights do not fit the model: {', '.join(wrong[:3])}")
    model.load_state_dict(tensors, assign=assign)


def _named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>:<name>`, for plain numbers `<parameter>:<name>:<int, float or bool>`.

    Hyper-parameters are configuration.
    """
    tensors = {}
    for name, parameter in _named_states(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}:{key}"] = value
            elif value is not None:
                tensors[f"{name}:{key}:{type(value).__name__}"] = torch.tensor(value, dtype=NUMBERS[type(value)])
    return tensors


def check_savable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        CodeError: something of the state does not go into a snapshot.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            raise CodeError(f"the model's {name} cannot be saved: {_kind(value)}; use a tensor of a usual type")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in names:
            raise CodeError("the optimizer has a parameter that is not the model's")
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise CodeError(f"the optimizer's state[{str(parameter)[:50]!r}] cannot be saved: it is of no parameter")
        for key, value in state.items():
            fits = value is None or type(value) in NUMBERS or (isinstance(value, Tensor) and value.dtype in NAMES)
            if not fits or not isinstance(key, str) or ":" in key:
                raise CodeError(
                    f"the optimizer's state {key!r} of {names[parameter]} cannot be saved: {_kind(value)}; "
                    "snapshots hold tensors, numbers and null, by names without a colon"
                )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """
    Raises:
        SnapshotError: state of parameters that the model does not have.
    """
    parameters = dict(_named_states(model, optimizer))
    states: dict[str, dict[str, Tensor | float]] = {name: {} for name in parameters}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.partition(":")
        key, _, kind = key.partition(":")
        if name not in states or (kind and (kind not in _KINDS or tensor.dim())):
            raise SnapshotError(f"the snapshot's optimizer state does not fit the model: {name}")
        states[name][key] = _KINDS[kind](tensor.item()) if kind else tensor
    if type(optimizer) in UNIFORM:
        remaining = iter(parameters.items())
        for group in optimizer.param_groups:
            _check_state(dict(islice(remaining, len(group["params"]))), states, _kept(optimizer, group))
    # The optimizer's own loader knows which of its tensors follow the parameter to its device and which stay.
    packed = optimizer.state_dict()
    packed["state"] = {i: states[name] for i, name in enumerate(parameters) if states[name]}
    optimizer.load_state_dict(packed)
    for name, parameter in parameters.items():  # but it would give all of them the parameter's type
        for key, value in states[name].items():
            own = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(own, Tensor) and own.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(own.device)


UNIFORM = (torch.optim.AdamW, torch.optim.SGD, Muon)  # their states: of one kind in a group, of the parameter's shape
_KINDS = {kind.__name__: kind for kind in NUMBERS}


def _kept(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """The names of what one of `UNIFORM` keeps of a parameter in this group, once it has changed it."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"}
    if group.get("muon"):
        return {"step", "momentum"}
    return {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group["amsgrad"] else set())


def _check_state(
    parameters: dict[str, nn.Parameter], states: dict[str, dict[str, Tensor | float]], kept: set[str]
) -> None:
    """Fused kernels trust it blindly: what is too short or of another type would have them write anywhere in memory.

    Raises:
        SnapshotError: something of it is lacking, or has another shape or type than the optimizer would give it.
    """
    for name, parameter in parameters.items():
        state = states[name]
        if state and state.keys() != kept:  # one without gradients has none
            raise SnapshotError(f"the snapshot's optimizer state of {name} is not {', '.join(sorted(kept))}")
        for key, value in state.items():
            wanted = ((), torch.float32) if key == "step" else (parameter.shape, parameter.dtype)
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != wanted:
                raise SnapshotError(f"the snapshot's optimizer state does not fit the model: {name}")
