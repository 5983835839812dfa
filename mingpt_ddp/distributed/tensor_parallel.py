"""Tensor parallelism: the heads and the MLP's hidden features of a GPT are split over the ranks of
a tensor group.

Consecutive ranks form a tensor group: they hold one copy of the model together and get the same
micro-batches. The first layer of a pair (qkv, up) is split by its outputs, the second (proj, down)
by its inputs, so that each pair needs one all-reduce in the forward pass and one in the backward
pass. Everything else is on every rank.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), by torch's DTensor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mingpt_ddp.config.components import GPTConfig
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import uses_user_code
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.torch_internals import for_each

if TYPE_CHECKING:
    # half a second, which other runs need not wait for
    from torch.distributed.tensor import DTensor

# matrices that the weight of a layer of this name concatenates; each of them is split
FUSED_PARTS = {"qkv": 3}


def check_tensor_parallel(config: Config) -> None:
    """Refuse what tensor parallelism cannot train with the numbers of a single rank.

    Raises:
        ConfigError: names the keys.
    """
    size = config.ddp.tensor_parallel
    model = config.model
    if size == 1:
        return
    reasons = {
        "ddp.strategy=auto": config.ddp.strategy == "auto",
        "model.devices=1": model.devices == 1,
        "model.architecture=gpt": model.architecture == "gpt",
        "model.dropout=0, because split and whole activations need different masks": not getattr(
            model, "dropout", 0
        ),
        "built-in optimizers, tasks and datasets": not uses_user_code(config),
        "optimizer=adamw or sgd, because Muon needs whole matrices": config.optimizer.name
        != "muon",
        (
            "trainer.precision=fp32 or bf16, because each rank would scale its loss"
        ): config.trainer.precision != "fp16",
    }
    for needed, is_met in reasons.items():
        if not is_met:
            raise ConfigError(f"ddp.tensor_parallel={size} needs {needed}; or set it to 1")
    assert isinstance(model, GPTConfig)
    if model.n_head % size:
        raise ConfigError(
            f"ddp.tensor_parallel={size} must divide model.n_head={model.n_head}; change one "
            "of them"
        )


def split_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a GPT over the ranks of this tensor group, in place; return it.

    The parameters keep their names.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {
        **{"attention.qkv": ColwiseParallel(), "attention.proj": RowwiseParallel()},
        **{"up": ColwiseParallel(), "down": RowwiseParallel()},
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_by_rank(name, parameter, mesh.size()))
    for block in model.get_submodule("blocks").children():
        attention = vars(block.get_submodule("attention"))
        attention["n_head"] //= mesh.size()  # those of this rank
        parallelize_module(block, mesh, styles)
    return model


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is torch's DTensor, without importing it."""
    return hasattr(tensor, "device_mesh")


def _parts(name: str) -> int:
    """Return how many matrices the parameter of this name concatenates."""
    return next((parts for layer, parts in FUSED_PARTS.items() if f".{layer}." in name), 1)


def _by_rank(name: str, whole: Tensor, ranks: int) -> Tensor:
    """Reorder the rows of a fused weight from (part, rank, head) to (rank, part, head), which a
    rank's shard needs.
    """
    if (parts := _parts(name)) == 1:
        return whole
    return whole.unflatten(0, (parts, ranks, -1)).transpose(0, 1).flatten(0, 2)


def gather(name: str, tensor: Tensor) -> Tensor:
    """Return the whole of a parameter or of its optimizer state, in the order of a single rank.

    A collective.
    """
    if not is_dtensor(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    if (parts := _parts(name)) == 1:
        return whole
    return whole.unflatten(0, (tensor.device_mesh.size(), parts, -1)).transpose(0, 1).flatten(0, 2)


def scatter(name: str, whole: Tensor, like: Tensor) -> Tensor:
    """Return what `gather` undoes: this rank's part of a tensor, split as `like`.

    Others are returned as they are.
    """
    if not is_dtensor(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import DTensor, Shard

    mesh = like.device_mesh
    placements = like.placements
    (split,) = placements
    local = _by_rank(name, whole, mesh.size())
    if isinstance(split, Shard):
        local = local.chunk(mesh.size(), dim=split.dim)[mesh.get_local_rank()]
    return DTensor.from_local(local.contiguous().to(like.device), mesh, placements, run_check=False)


def separate_groups(optimizer: torch.optim.Optimizer) -> None:
    """Let each parameter group hold either split parameters or whole ones: a fused kernel takes no
    mixture.
    """
    groups = []
    for group in optimizer.param_groups:
        for is_split in (False, True):
            members = [p for p in group["params"] if is_dtensor(p) == is_split]
            groups.append({**group, "params": members})
            # whose fused kernel takes no DTensor
            if is_split and isinstance(optimizer, torch.optim.SGD):
                groups[-1]["fused"] = None
    optimizer.param_groups[:] = [group for group in groups if group["params"]]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a split tensor, sharing its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def average_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Average the gradients over the ranks that hold the same part of the model."""
    assert group.mesh is not None
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if group.data_size > 1:
        pending = [
            dist.all_reduce(g, group=group.mesh.get_group("data"), async_op=True) for g in gradients
        ]
        for each in pending:
            each.wait()
        for_each("div_", gradients, group.data_size)


def clip_gradients(
    parameters: Sequence[nn.Parameter], limit: float | None, group: ProcessGroup
) -> Tensor:
    """Clip the gradients of a split model.

    Return their norm before clipping, that of the whole model.
    """
    assert group.mesh is not None
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_split = [is_dtensor(g) and g.placements[0].is_shard() for g in gradients]
    own = [local_tensor(g) for g, split in zip(gradients, is_split, strict=True) if split]
    everywhere = [
        local_tensor(g) for g, split in zip(gradients, is_split, strict=True) if not split
    ]
    square = nn.utils.get_total_norm(own).square()
    dist.all_reduce(square, group=group.mesh.get_group("tensor"))
    norm = (square + nn.utils.get_total_norm(everywhere).square()).sqrt()
    if limit is not None:
        # as torch's clip_grad_norm_
        for_each("mul_", [*own, *everywhere], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
