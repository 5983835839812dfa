"""Compute the sizes of a model and of its training step, without allocating their memory.

The model is built on torch's meta device, where tensors have shapes but no values. If an optimizer
does not declare which state it keeps, it takes a step there, which creates the state. The size of
activations comes from formulas, with an entry in BLOCK_MEMORY for each architecture.

Symbols: B sequences in a micro-batch, T tokens in a context, C = n_embd, H = n_head, V outputs.
E = B T C is the number of elements that go from one block to the next. An element takes s bytes in
matrix products.
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

FP32 = 4  # bytes of an element


@dataclass(frozen=True)
class BlockMemory:
    """The memory that one block keeps for its backward pass.

    Fields without another unit count tensors of E elements: a tensor of 4 E elements counts as 4.
    The product type is the type of matrix products: bf16, fp16 or fp32.
    """

    fp32: int  # tensors that are kept in fp32
    products: int  # tensors that are kept in the product type
    split: int  # number of those `products` that tensor parallelism divides between ranks
    per_head: int  # bytes for each head and token, for the sums and norms of attention
    before_blocks: int  # tensors in the product type that are kept before the first block
    backward: int  # tensors in the product type that the backward pass of a block allocates
    fp32_input: bool  # True if the block's input, which a recomputed block keeps, is in fp32
    is_tied: bool  # True if the output layer shares its weight with the embedding


# Numbers in parentheses count tensors of E elements.
# gpt keeps the inputs of both norms in fp32 (2). In the product type it keeps the inputs of qkv and
# up (2). It also keeps tensors that are split: q, k, v and the input of proj (4), and the hidden
# features (4 E) before and after GELU (8).
# modern also keeps the inputs of the norms of q and k in fp32. In the product type it keeps the
# terms and results of both smears (4), rotated q and k (2), values and the input of proj (2), and
# the hidden features (8).
BLOCK_MEMORY: dict[type, BlockMemory] = {
    GPT: BlockMemory(
        2, 14, 12, per_head=4, before_blocks=0, backward=7, fp32_input=True, is_tied=True
    ),
    Modern: BlockMemory(
        4, 16, 0, per_head=20, before_blocks=7, backward=11, fp32_input=False, is_tied=False
    ),
}


@dataclass(frozen=True)
class Activations:
    """Memory for the activations of a model, in bytes unless a method says otherwise."""

    per_block: BlockMemory
    model: TransformerConfig
    length: int  # T
    outputs: int  # V
    itemsize: int  # s

    def stream(self, rows: int) -> int:
        """Return E for `rows` sequences, a number of elements."""
        return rows * self.length * self.model.n_embd

    def block(self, rows: int, tensor_parallel: int = 1) -> int:
        """Return the bytes that a block keeps for its backward pass, without copies of its weights.

        Args:
            rows: Number of sequences in a micro-batch.
            tensor_parallel: Number of ranks that divide the block's matrices.
        """
        products = (
            self.per_block.products - self.per_block.split * (tensor_parallel - 1) / tensor_parallel
        )
        masks = 2 * (self.model.dropout > 0)
        per_element = FP32 * self.per_block.fp32 + self.itemsize * products + masks
        heads = self.per_block.per_head * rows * self.length * self.model.n_head
        return round(per_element * self.stream(rows) + heads / tensor_parallel)

    def block_input(self, rows: int, gathers: bool) -> int:
        """Return the bytes of a block's input.

        Args:
            rows: Number of sequences in a micro-batch.
            gathers: True if the strategy gathers weights in the product type (fsdp, hsdp).
        """
        is_fp32 = self.per_block.fp32_input and not gathers
        return (FP32 if is_fp32 else self.itemsize) * self.stream(rows)

    def logits(self, rows: int) -> int:
        """Return B T V for `rows` sequences, a number of elements."""
        return rows * self.length * self.outputs


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its optimizer after a step, in elements unless the name has a unit."""

    parameters: int
    trained: int
    largest: int  # the largest trained parameter
    block: int
    blocks: int  # all blocks together, which tensor parallelism divides
    muon: int  # all matrices that Muon orthogonalizes
    optimizer_bytes: int
    buffer_bytes: int
    # FLOP of the forward and backward pass. None if the model has no flops_per_token().
    flops_per_item: float | None
    itemsize: int  # s
    scalars: list[str]  # names of trained parameters that have no dimension
    # None if the user wrote the model, a part of it or the task.
    activations: Activations | None

    def snapshot_bytes(self, has_average: bool) -> int:
        """Return the bytes of a snapshot.

        Args:
            has_average: True if the run averages its weights (trainer.ema).
        """
        weights = FP32 * self.parameters * (1 + has_average)
        return weights + self.buffer_bytes + self.optimizer_bytes


def sizes(config: Config, vocab_size: int | None = None) -> Sizes:
    """Compute the sizes of the model that a configuration describes.

    The data of the configuration is read, because the vocabulary depends on it.

    Args:
        vocab_size: Replaces the size of the text's own vocabulary.

    Raises:
        UserError: Training would refuse the configuration, or the user's code reads values of
            tensors, which have none on the meta device.
    """
    task = build_task(config, ProcessGroup(DistEnv(), for_one_rank(config.ddp), job=0))
    if vocab_size is not None:
        task.set_outputs(vocab_size)
    return sizes_of(task, gpu_precision(config.trainer.precision))


def gpu_precision(precision: str) -> str:
    """Return the precision on a GPU that is fast at bf16: `auto` becomes bf16."""
    return "bf16" if precision == "auto" else precision


def sizes_of(task: Task, precision: str, device: str = "meta") -> Sizes:
    """Compute the sizes of a task's model and of its optimizer.

    Args:
        task: The task that builds the model.
        precision: Precision of matrix products: fp32, bf16 or fp16.
        device: Where to build the model: meta, or cpu for code that reads values of tensors.

    Raises:
        ConfigError: The user's code fails on this device.
    """
    config = task.config
    try:
        with attribute_errors_to_user_code():
            with torch.device(device):
                model = task.build_model()
                if config.trainer.activation_checkpointing:
                    apply_activation_checkpointing(model)
                optimizer = build_optimizer(model, config.optimizer)
            # Outside of the device's context, an optimizer that takes a step creates its count of
            # steps on the CPU, where it can read the count.
            states = declared_state(optimizer) or _measured_state(optimizer)
    except ConfigError:
        raise
    except Exception as error:  # from the user's code
        reason = " ".join(str(error).split())
        raise ConfigError(
            "device= builds the model and its optimizer on torch's meta device, whose tensors have "
            f"no values, and your code failed there ({reason[:300]}); leave out device=, or do not "
            "read values of tensors while the model is built and the optimizer takes a step"
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
    """Take a step with zero gradients. Return the state that the optimizer has created."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False  # the meta device has no fused kernel
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer.state


def _activations(task: Task, model: nn.Module, itemsize: int) -> Activations | None:
    """Return the memory for activations, or None if it is not known for this model and task."""
    config = task.config.model
    per_block = BLOCK_MEMORY.get(type(model))
    if per_block is None or type(task) is not LanguageModel or changed_parts(vars(config)):
        return None
    assert isinstance(config, TransformerConfig)
    outputs, length = task.shape
    return Activations(per_block, config, length, outputs, itemsize)
