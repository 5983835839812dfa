"""Tensor parallelism: split the heads and the MLP's hidden features of a GPT over ranks.

Consecutive ranks form a tensor group: they hold one copy of the model together and get the same
micro-batches. The first layer of a pair (qkv, up) is split by its outputs and the second one (proj,
down) by its inputs. Then each pair needs one all-reduce in the forward pass and one in the backward
pass. Everything else is whole on every rank. The split tensors are torch's DTensors.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.model_config import GPTConfig, changed_parts
from mingpt_ddp.config.user_code import uses_user_code
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.block_parts import MultiHead
from mingpt_ddp.models.dtensor import is_dtensor, local_tensor, whole_tensor
from mingpt_ddp.models.gpt import Block
from mingpt_ddp.torch_internals import for_each

# Number of matrices that the weight of a layer concatenates, by its name. Each of them is split.
FUSED_PARTS = {"qkv": 3}
# Dimension of a layer's weight that is split, by the layer's name in a block.
SPLIT_DIMENSIONS = {"attention.qkv": 0, "attention.proj": 1, "up": 0, "down": 1}


def check_tensor_parallel(config: Config) -> None:
    """Refuse settings with which tensor parallelism would not compute the results of one rank.

    Raises:
        ConfigError: A setting is refused. The message names the key to change.
    """
    size = config.ddp.tensor_parallel
    model = config.model
    if size == 1:
        return

    def need(is_met: bool, what: str) -> None:
        if not is_met:
            raise ConfigError(
                f"ddp.tensor_parallel={size} needs {what}; otherwise set ddp.tensor_parallel=1"
            )

    has_dropout = bool(getattr(model, "dropout", 0))
    need(config.ddp.strategy == "auto", "ddp.strategy=auto")
    need(model.architecture == "gpt", "model.architecture=gpt")
    need(
        not has_dropout,
        "model.dropout=0, because split and whole activations need different masks",
    )
    parts = " and ".join(changed_parts(vars(model)))
    need(not parts, f"the original parts of the architecture, without {parts}")
    need(not uses_user_code(config), "built-in optimizers, tasks and datasets")
    need(
        not config.optimizer.needs_whole_matrices,
        "another optimizer, such as optimizer=adamw, because "
        f"{config.optimizer.name} needs whole matrices",
    )
    need(
        config.trainer.precision != "fp16",
        "trainer.precision=fp32 or bf16, because each rank would scale its loss",
    )
    assert isinstance(model, GPTConfig)
    if model.n_head % size:
        raise ConfigError(
            f"ddp.tensor_parallel={size} must divide model.n_head={model.n_head}; "
            "change one of them"
        )


def split_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a GPT over the ranks of this tensor group in place, and return it.

    The parameters keep their names.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if dimension == 0 else RowwiseParallel()
        for name, dimension in SPLIT_DIMENSIONS.items()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_by_rank(name, parameter, mesh.size()))
    for block in model.get_submodule("blocks").children():
        assert isinstance(block, Block) and isinstance(block.attention, MultiHead)
        block.attention.n_head //= mesh.size()  # number of heads on this rank
        parallelize_module(block, mesh, styles)
    return model


def _matrices_in(name: str) -> int:
    """Return the number of matrices that the parameter of this name concatenates."""
    for layer, parts in FUSED_PARTS.items():
        if f".{layer}." in name:
            return parts
    return 1


def _by_rank(name: str, whole: Tensor, ranks: int) -> Tensor:
    """Reorder the rows of a fused weight from (part, rank, head) to (rank, part, head)."""
    parts = _matrices_in(name)
    if parts == 1:
        return whole
    return whole.unflatten(0, (parts, ranks, -1)).transpose(0, 1).flatten(0, 2)


def gather(name: str, tensor: Tensor) -> Tensor:
    """Return a whole parameter, or its whole optimizer state, in the row order of a single rank.

    A collective.
    """
    whole = whole_tensor(tensor)
    parts = _matrices_in(name)
    if parts == 1 or not is_dtensor(tensor):
        return whole
    ranks = tensor.device_mesh.size()
    return whole.unflatten(0, (ranks, parts, -1)).transpose(0, 1).flatten(0, 2)


def scatter(name: str, whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, split as `like`. This is the inverse of `gather`.

    If `like` is not split, or has a different shape, return the whole tensor.
    """
    if not is_dtensor(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import DTensor, Shard

    mesh = like.device_mesh
    [placement] = like.placements
    local = _by_rank(name, whole, mesh.size())
    if isinstance(placement, Shard):
        local = local.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()]
    local = local.contiguous().to(like.device)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def separate_groups(optimizer: torch.optim.Optimizer) -> None:
    """Separate split parameters from whole ones: a fused kernel does not take a group of both."""
    groups = []
    for group in optimizer.param_groups:
        for is_split in (False, True):
            members = [p for p in group["params"] if is_dtensor(p) == is_split]
            if not members:
                continue
            groups.append({**group, "params": members})
    optimizer.param_groups[:] = groups


def average_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Average the gradients over the ranks that hold the same shard of the model."""
    assert group.mesh is not None
    if group.data_size == 1:
        return
    copies = group.mesh.get_group("data")
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    pending = [dist.all_reduce(g, group=copies, async_op=True) for g in gradients]
    for each in pending:
        each.wait()
    for_each("div_", gradients, group.data_size)


def total_norm(gradients: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Return the norm of the gradients of the whole model."""
    assert group.mesh is not None
    split: list[Tensor] = []  # this rank's shards of gradients
    everywhere: list[Tensor] = []  # gradients that are the same on all ranks of a copy
    for gradient in gradients:
        is_split = is_dtensor(gradient) and gradient.placements[0].is_shard()
        members = split if is_split else everywhere
        members.append(local_tensor(gradient))
    square = nn.utils.get_total_norm(split).square()
    dist.all_reduce(square, group=group.mesh.get_group("tensor"))
    return (square + nn.utils.get_total_norm(everywhere).square()).sqrt()
