"""The parameters and the optimizer's state of a run, as shapes without memory."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from mingpt_ddp.config.builders import attribute_errors_to_user_code
from mingpt_ddp.distributed.strategies.tensor_split import keep_part
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import apply_activation_checkpointing
from mingpt_ddp.models.ops import DTYPES
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.tasks.task import Task


def precision_of_gpu(precision: str) -> str:
    """Return fp32, bf16 or fp16; a GPU that is fast at bf16 resolves auto to it."""
    return "bf16" if precision == "auto" else precision


def part_bytes(tensor: Tensor, shards: int) -> int:
    """Return the bytes of the largest of `shards` parts, divided by rows: ceil(rows / shards)."""
    if not tensor.dim() or not tensor.shape[0]:
        return tensor.nbytes
    rows = -(-tensor.shape[0] // shards)
    return rows * tensor.nbytes // tensor.shape[0]


class State:
    """A model and its optimizer after a step, on torch's meta device: shapes without memory."""

    def __init__(self, task: Task, parts: int = 1) -> None:
        """
        Args:
            parts: ranks that hold a copy of the model together, of which this is one.

        Raises:
            ConfigError: a user's code fails without data.
        """
        config = task.config
        self.task = task
        self.parts = parts
        self.dtype = DTYPES[precision_of_gpu(config.trainer.precision)]  # of products
        try:
            with attribute_errors_to_user_code():
                with torch.device("meta"):
                    self.model = task.build_model()
                    if parts > 1:
                        keep_part(self.model, parts)
                    if config.trainer.activation_checkpointing:
                        apply_activation_checkpointing(self.model)
                    self.optimizer = build_optimizer(self.model, config.optimizer)
                self._step()  # outside: an optimizer may read its count of steps
        except ConfigError:
            raise
        except Exception as error:  # of a user's code
            reason = " ".join(str(error).split())
            raise ConfigError(
                "device= builds the model and steps its optimizer without data, and there they "
                f"fail; leave it out, or let the code read no values ({reason[:300]})"
            ) from error
        self.parameters = dict(self.model.named_parameters())
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        self.numel = sum(p.numel() for p in self.parameters.values())
        blocks = getattr(self.model, "blocks", ())
        self.blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]

    def _step(self) -> None:
        for group in self.optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # no kernel of this device
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()

    def optimizer_tensors(self, name: str) -> list[Tensor]:
        """Return what the optimizer keeps of a parameter."""
        values = self.optimizer.state.get(self.trained[name], {}).values()
        return [value for value in values if isinstance(value, Tensor)]

    def stacks(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return what Muon orthogonalizes at once of these parameters, matrices of one shape.

        Of each shape their number, and the elements of one.
        """
        if not isinstance(self.optimizer, Muon):
            return []
        counts = Counter[torch.Size]()
        for name in names:
            parameter = self.trained[name]
            if "momentum" in self.optimizer.state[parameter]:
                rows = parameter.shape[-2] // self.optimizer.parts[parameter]
                shape = torch.Size((rows, parameter.shape[-1]))
                counts[shape] += parameter.numel() // shape.numel()
        return [(count, shape.numel()) for shape, count in counts.items()]
