"""Between live objects and named tensors: what of a model and an optimizer is saved, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import SnapshotError


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, and copies of its buffers: a forward pass may already change those."""
    buffers = {name for name, _ in model.named_buffers()}
    state = model.state_dict()
    return {name: tensor.clone() if name in buffers else tensor for name, tensor in state.items()}


def load_model(model: nn.Module, tensors: dict[str, Tensor], assign: bool = False) -> None:
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


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>:<name>`; hyper-parameters are configuration."""
    tensors = {}
    for name, parameter in _named_states(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}:{key}"] = torch.as_tensor(value)
    return tensors


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """
    Raises:
        SnapshotError: state of parameters that the model does not have.
    """
    parameters = dict(_named_states(model, optimizer))
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(":")
        if name not in states:
            raise SnapshotError(f"the snapshot's optimizer state does not fit the model: {name}")
        states[name][key] = tensor
    if len({frozenset(state) for state in states.values()}) > 1:
        raise SnapshotError("the snapshot's optimizer state lacks some of the parameters")
    for name, state in states.items():
        if any(tensor.dim() and tensor.shape != parameters[name].shape for tensor in state.values()):
            raise SnapshotError(f"the snapshot's optimizer state does not fit the model: {name}")
    # The optimizer's own loader knows which of its tensors follow the parameter to its device and which stay.
    packed = optimizer.state_dict()
    packed["state"] = {i: states[name] for i, name in enumerate(parameters) if states[name]}
    optimizer.load_state_dict(packed)
