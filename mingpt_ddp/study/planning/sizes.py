"""Compute the sizes of a model and of its training step, without memory for either.

The model is built on torch's meta device, where tensors have shapes and no values. An optimizer
that does not declare its state takes a step there. Activations come from formulas, with a row of
BLOCKS for each architecture.

Symbols: B sequences of a micro-batch, T tokens of a context, C = n_embd, H = n_head, V outputs;
E = B T C, the elements between two blocks; s bytes of an element in matrix products.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mingpt_ddp.config.builders import attribute_errors_to_user_code
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.model_config import TransformerConfig, changed_parts
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies.single import for_one_rank
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import apply_activation_checkpointing, flops_per_token
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern
from mingpt_ddp.models.ops import DTYPES
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.state import State, declared_state
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.tasks.task import Task

FP32 = 4  # bytes


@dataclass(frozen=True)
class BlockRow:
    """What one block keeps for its backward pass, as numbers of E elements."""

    fp32: int
    products: int  # in the type of matrix products
    split: int  # how many of `products` are divided by tensor parallelism
    per_head: int  # bytes for each head and token, for sums and norms of attention
    before: int  # in the type of products, kept before the first block
    backward: int  # in the type of products, allocated by the backward pass of one block
    fp32_input: bool  # the residual stream, which recomputed blocks keep, is in fp32
    is_tied: bool  # the head's weight is the embedding's


# gpt keeps the inputs of both norms in fp32 (2). In the type of products it keeps the inputs of qkv
# and up (2), and these, which are split: q, k, v, the input of proj (4), and the hidden features
# (4 E) before and after GELU (8).
# modern also keeps the inputs of the norms of q and k in fp32. In the type of products it keeps the
# terms and results of both smears (4), rotated q and k (2), values and the input of proj (2), and
# the hidden features (8).
BLOCKS: dict[type, BlockRow] = {
    GPT: BlockRow(2, 14, 12, per_head=4, before=0, backward=7, fp32_input=True, is_tied=True),
    Modern: BlockRow(4, 16, 0, per_head=20, before=7, backward=11, fp32_input=False, is_tied=False),
}


@dataclass(frozen=True)
class Activations:
    """Memory for the activations of a model, in bytes unless a method says otherwise."""

    row: BlockRow
    model: TransformerConfig
    length: int  # T
    outputs: int  # V
    itemsize: int  # s

    def stream(self, rows: int) -> int:
        """Return E for `rows` sequences, a number of elements."""
        return rows * self.length * self.model.n_embd

    def block(self, rows: int, parts: int = 1) -> int:
        """Return the bytes that a block keeps for its backward pass, without copies of its weights.

        Args:
            parts: Ranks that divide its matrices (ddp.tensor_parallel).
        """
        products = self.row.products - self.row.split * (parts - 1) / parts
        masks = 2 * (self.model.dropout > 0)
        per_element = FP32 * self.row.fp32 + self.itemsize * products + masks
        heads = self.row.per_head * rows * self.length * self.model.n_head
        return round(per_element * self.stream(rows) + heads / parts)

    def block_input(self, rows: int, gathers: bool) -> int:
        """Return the bytes of a block's input.

        Args:
            gathers: The strategy gathers weights in the type of products (fsdp, hsdp).
        """
        is_fp32 = self.row.fp32_input and not gathers
        return (FP32 if is_fp32 else self.itemsize) * self.stream(rows)

    def logits(self, rows: int) -> int:
        """Return B T V for `rows` sequences, a number of elements."""
        return rows * self.length * self.outputs


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of its optimizer after a step, in elements unless a name has a unit."""

    parameters: int
    trained: int
    largest: int  # the largest trained parameter
    block: int  # the largest block
    blocks: int  # all blocks together, which tensor parallelism divides
    muon: int  # all matrices that Muon orthogonalizes
    optimizer_bytes: int
    buffer_bytes: int
    flops_per_item: float | None  # of both passes; None if the model has no flops_per_token
    itemsize: int  # s
    scalars: list[str]  # names of trained parameters without rows
    activations: Activations | None  # None if a user wrote the model, a part of it or the task

    def snapshot_bytes(self, with_average: bool) -> int:
        weights = FP32 * self.parameters * (1 + with_average)
        return weights + self.buffer_bytes + self.optimizer_bytes


def sizes(config: Config, vocab_size: int | None = None) -> Sizes:
    """Return the sizes of the model of a configuration. Its data is read for the vocabulary.

    Args:
        vocab_size: Replaces the size of the text's own vocabulary.

    Raises:
        UserError: Training would refuse the configuration, or a user's code needs values.
    """
    task = build_task(config, ProcessGroup(DistEnv(), for_one_rank(config.ddp), job=0))
    if vocab_size is not None:
        task.set_outputs(vocab_size)
    return sizes_of(task, gpu_precision(config.trainer.precision))


def gpu_precision(precision: str) -> str:
    """Return fp32, bf16 or fp16. On a GPU that is fast at bf16, auto means bf16."""
    return "bf16" if precision == "auto" else precision


def sizes_of(task: Task, precision: str, device: str = "meta") -> Sizes:
    """Return the sizes of a task's model, with matrix products in a precision.

    Args:
        device: Where to build the model: meta, or cpu for code that reads values.

    Raises:
        ConfigError: A user's code fails without values.
    """
    config = task.config
    try:
        with attribute_errors_to_user_code():
            with torch.device(device):
                model = task.build_model()
                if config.trainer.activation_checkpointing:
                    apply_activation_checkpointing(model)
                optimizer = build_optimizer(model, config.optimizer)
            # outside of the device's context, because a step may read the count of steps
            states = declared_state(optimizer) or _measured_state(optimizer)
    except ConfigError:
        raise
    except Exception as error:  # from a user's code
        reason = " ".join(str(error).split())
        raise ConfigError(
            "device= builds the model and steps its optimizer without data, and there they "
            f"fail; leave it out, or let the code read no values ({reason[:300]})"
        ) from error
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    blocks = [sum(p.numel() for p in b.parameters()) for b in getattr(model, "blocks", ())]
    muon = [p for group in optimizer.param_groups if group.get("muon") for p in group["params"]]
    tensors = [value for state in states.values() for value in state.values()]
    itemsize = DTYPES[precision].itemsize
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained.values()),
        largest=max((p.numel() for p in trained.values()), default=0),
        block=max(blocks, default=0),
        blocks=sum(blocks),
        muon=sum(p.numel() for p in muon),
        optimizer_bytes=sum(value.nbytes for value in tensors if isinstance(value, Tensor)),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        flops_per_item=flops_per_token(model),
        itemsize=itemsize,
        scalars=[name for name, p in trained.items() if p.dim() == 0],
        activations=_activations(task, model, itemsize),
    )


def _measured_state(optimizer: Optimizer) -> Mapping[Tensor, State]:
    """Take a step. Return the state that the optimizer has created for each parameter."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False  # the meta device has no fused kernel
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer.state


def _activations(task: Task, model: nn.Module, itemsize: int) -> Activations | None:
    config = task.config.model
    row = BLOCKS.get(type(model))
    if row is None or type(task) is not LanguageModel or changed_parts(vars(config)):
        return None
    assert isinstance(config, TransformerConfig)
    outputs, length = task.shape
    return Activations(row, config, length, outputs, itemsize)
