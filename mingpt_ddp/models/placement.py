"""Split a model over several devices of one rank: its blocks in equal runs.

Everything else stays on the first device, where the batch is: the embedding, the final norm, the
head and the loss. So a head that is tied to the embedding needs no second copy, and the model's own
code does not change. Hooks move what a block takes to its device, and what the last block returns
back to the first device.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import ConfigError

Move = Callable[[Tensor, torch.device], Tensor]


def split_blocks(
    model: nn.Module, devices: Sequence[torch.device], move: Move = Tensor.to
) -> nn.Module:
    """Move a model to its devices, in place; return it. The parameters keep their names and values.

    Args:
        devices: of this rank; the same device several times is allowed, and one device takes any
            model.
        move: copies a tensor to another device.

    Raises:
        ConfigError: the model cannot be split.
    """
    if len(devices) == 1:
        return model.to(devices[0])
    blocks = blocks_of(model, len(devices))
    indices = [i * len(devices) // len(blocks) for i in range(len(blocks))]  # of blocks' devices

    index_of_module: dict[nn.Module, int] = {}
    for block, index in zip(blocks, indices, strict=True):
        for module in block.modules():
            index_of_module[module] = index
    _refuse_shared_parameters(model, index_of_module, len(devices))
    for module in model.modules():
        move_tensors(module, devices[index_of_module.get(module, 0)])

    previous = devices[0]
    for block, index in zip(blocks, indices, strict=True):
        move_inputs = partial(_move_inputs, move, previous, devices[index])
        block.register_forward_pre_hook(move_inputs, with_kwargs=True, prepend=True)
        previous = devices[index]
    blocks[-1].register_forward_hook(partial(_move_output, move, previous, devices[0]))
    return model


def _refuse_shared_parameters(
    model: nn.Module, index_of_module: dict[nn.Module, int], devices: int
) -> None:
    index_of_parameter: dict[nn.Parameter, int] = {}
    for module in model.modules():
        index = index_of_module.get(module, 0)
        for parameter in module.parameters(recurse=False):
            if index_of_parameter.setdefault(parameter, index) != index:
                raise ConfigError(
                    f"model.devices={devices}: {type(model).__name__} shares a parameter "
                    "between two devices; set it to 1"
                )


def blocks_of(model: nn.Module, devices: int) -> list[nn.Module]:
    """Return the parts that `split_blocks` distributes, at least one per device.

    Raises:
        ConfigError: there are too few, or none.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        raise ConfigError(
            f"model.devices={devices} needs a model with blocks, an nn.ModuleList whose "
            f"modules run one after the other, and {type(model).__name__} has none; set it to 1"
        )
    if len(blocks) < devices:
        raise ConfigError(
            f"model.devices={devices}, but the model has {len(blocks)} blocks; lower it"
        )
    return list(blocks)


def move_tensors(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers in place, as nn.Module.to does, but not those of submodules."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data = tensor.data.to(device)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter."""
    return next(module.parameters()).device


def is_split(model: nn.Module) -> bool:
    """Return whether the parameters are on several devices."""
    return len({parameter.device for parameter in model.parameters()}) > 1


def _move_inputs(
    move: Move,
    previous: torch.device,
    device: torch.device,
    block: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """Move what a block takes: a forward pre-hook, after the first three arguments."""
    _continue_generator(previous, device)
    return _moved(args, device, move), _moved(kwargs, device, move)


def _move_output(
    move: Move,
    previous: torch.device,
    device: torch.device,
    block: nn.Module,
    args: Any,
    output: Any,
) -> Any:
    """Move what a block returns: a forward hook, after the first three arguments."""
    _continue_generator(previous, device)
    return _moved(output, device, move)


def _moved(value: Any, device: torch.device, move: Move) -> Any:
    """Move the tensors in tuples, lists and dicts.

    Other objects, such as a KV cache, are on the block's device.
    """
    if isinstance(value, Tensor):
        return move(value, device)
    if type(value) in (tuple, list):
        return type(value)(_moved(part, device, move) for part in value)
    if type(value) is dict:
        return {key: _moved(part, device, move) for key, part in value.items()}
    return value


def _continue_generator(previous: torch.device, device: torch.device) -> None:
    """Let a GPU continue the random numbers of the previous one, as if they were one device."""
    if previous != device and previous.type == device.type == "cuda":
        state = torch.cuda.get_rng_state(previous)
        torch.cuda.set_rng_state(state, device)
