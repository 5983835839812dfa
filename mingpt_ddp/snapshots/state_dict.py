"""Turn the state of a model and an optimizer into named tensors for a snapshot, and load it back.

`check_savable` refuses a user's model or optimizer whose state a snapshot cannot hold.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.optim.state import State, declared_state
from mingpt_ddp.snapshots.staging_buffer import DTYPES

# Types of the numbers in an optimizer's state, and of the tensors that store them.
NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, and copies of its buffers, by name.

    The buffers are copied because the next forward pass may change them in place.
    """
    buffers = {name for name, _ in model.named_buffers()}
    state = dict(model.state_dict())
    for name in buffers & state.keys():
        state[name] = state[name].clone()
    return state


def load_model_state(model: nn.Module, tensors: dict[str, Tensor], assign: bool = False) -> None:
    """Load tensors that `model_state` has returned into a model.

    Args:
        assign: Make the tensors themselves the parameters, instead of copying their values.

    Raises:
        SnapshotError: The names, shapes or types of the tensors do not fit the model.
    """
    expected = model.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys())
    if not wrong:
        wrong = [name for name in expected if not _same_form(expected[name], tensors[name])]
    if wrong:
        raise SnapshotError(
            f"the snapshot's weights do not fit the model: {', '.join(wrong[:3])}; use the code "
            "and the model settings that saved it"
        )
    model.load_state_dict(tensors, assign=assign)


def _same_form(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same shape and type."""
    return a.shape == b.shape and a.dtype == b.dtype


def parameters_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer by their names in the model.

    They are in the order of the optimizer's parameter groups.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters[names[parameter]] = parameter
    return parameters


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer as named tensors.

    A tensor is named `<parameter>:<key>`. A plain number is named `<parameter>:<key>:<type>`, where
    the type is int, float or bool. Hyper-parameters are omitted, because they come from the
    configuration.
    """
    tensors = {}
    for name, parameter in parameters_by_name(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}:{key}"] = value
            elif value is not None:
                kind = type(value)
                number = torch.tensor(value, dtype=NUMBER_DTYPES[kind])
                tensors[f"{name}:{key}:{kind.__name__}"] = number
    return tensors


def check_savable(
    model: nn.Module, optimizer: torch.optim.Optimizer, by_rows: bool = False
) -> None:
    """Check that a snapshot can hold the state of a user's model and optimizer.

    Args:
        by_rows: True if each rank will hold some rows of the parameters (fsdp, hsdp). It then holds
            the same rows of their optimizer state.

    Raises:
        CodeError: A snapshot cannot hold an entry of the state, or the state of the
            optimizer differs from the state that it has declared with @declare_state.
    """
    for name, value in model.state_dict().items():
        if not _is_savable_tensor(value):
            raise CodeError(
                f"the model's {name} cannot be saved: its type is {_type_of(value)}; use a "
                "tensor of a standard type"
            )
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise CodeError(
                "the optimizer has a parameter that is not in the model; build the optimizer from "
                "the parameters of the model"
            )
    declared = declared_state(optimizer)
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise CodeError(
                f"the optimizer's state[{str(parameter)[:50]!r}] cannot be saved: its key is not a "
                "parameter of the model"
            )
        for key, value in state.items():
            what = f"the optimizer's state {key!r} of {names[parameter]}"
            is_number = value is None or type(value) in NUMBER_DTYPES
            is_name = isinstance(key, str) and ":" not in key
            if not is_name or not (is_number or _is_savable_tensor(value)):
                raise CodeError(
                    f"{what} cannot be saved: its type is {_type_of(value)}; a snapshot holds "
                    "tensors, numbers and None, under names without a colon"
                )
            is_per_element = isinstance(value, Tensor) and value.dim() > 0
            if by_rows and is_per_element and value.shape != parameter.shape:
                raise CodeError(
                    f"{what} does not have the shape of the parameter, so ddp.strategy=fsdp and "
                    "hsdp cannot split it; use ddp.strategy=zero1"
                )
        if declared is not None:
            kept = {key: value for key, value in state.items() if value is not None}
            if difference := _difference(kept, declared.get(parameter, {})):
                raise CodeError(
                    f"the optimizer's state of {names[parameter]} {difference}; change "
                    f"@declare_state({type(optimizer).__name__})"
                )


def _is_savable_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in DTYPES


def _type_of(value: Any) -> Any:
    """Describe the type of a value for an error message."""
    return getattr(value, "dtype", type(value).__name__)


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Load tensors that `optimizer_state` has returned into an optimizer.

    If the optimizer declares its state (@declare_state), any other state is refused. A fused kernel
    would not check the shapes, and would write out of bounds.

    Raises:
        SnapshotError: The state does not fit the parameters of the model, or the optimizer.
    """
    parameters = parameters_by_name(model, optimizer)
    number_types = {kind.__name__: kind for kind in NUMBER_DTYPES}
    states: dict[str, dict[str, Tensor | float]] = {name: {} for name in parameters}
    for full_name, tensor in tensors.items():
        name, _, rest = full_name.partition(":")
        key, _, kind = rest.partition(":")
        is_number = kind in number_types and tensor.dim() == 0
        if name not in states or (kind and not is_number):
            raise SnapshotError(
                f"the snapshot's optimizer state does not fit the model: {name}; use the code and "
                "the settings that saved it"
            )
        states[name][key] = number_types[kind](tensor.item()) if kind else tensor
    declared = declared_state(optimizer)
    if declared is not None:
        for name, parameter in parameters.items():
            # The declared state is empty if the momentum of SGD has been set to 0 since the save.
            if not declared[parameter]:
                states[name].clear()
            if difference := _difference(states[name], declared[parameter]):
                raise SnapshotError(
                    f"the snapshot's optimizer state of {name} {difference}; use the code and the "
                    "settings that saved it"
                )
    # The optimizer's own loader knows which of its tensors must move to the parameter's device.
    # But it also casts them to the parameter's type: the loop below undoes that.
    packed = optimizer.state_dict()
    packed["state"] = {i: states[name] for i, name in enumerate(parameters) if states[name]}
    optimizer.load_state_dict(packed)
    for name, parameter in parameters.items():
        for key, value in states[name].items():
            cast = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(cast.device)


def _difference(state: State, declared: State) -> str:
    """Describe how the state of a parameter differs from the declared state.

    If several entries differ, describe only the first. Return "" if the state does not differ, or
    if there is no state because the parameter has never had a gradient. The description completes a
    message "the optimizer's state of <parameter> ...".
    """
    if not state:
        return ""
    if state.keys() != declared.keys():
        names = ", ".join(sorted(declared))
        return f"does not have exactly the entries {names}" if declared else "is not empty"
    for key, value in state.items():
        found, expected = _shape_and_type(value), _shape_and_type(declared[key])
        if found != expected:
            return f"has the wrong {key}: {found} instead of {expected}"
    return ""


def _shape_and_type(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return type(value).__name__
