"""Look at a step of a repeated run: the loss of each sequence, and the gradient norm of each layer.

The step is rehearsed before it is trained. Its gradients are measured and dropped, so the training
goes on with the same bits as without a look.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.validation import check
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch, TokenLoader
from mingpt_ddp.data.text.origins import find_origins
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import kept_buffers
from mingpt_ddp.models.ops import cross_entropy
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.tasks.outputs import Outputs, outputs_of
from mingpt_ddp.training.train_step import TrainStep

LOOK = "MINGPT_DDP_LOOK"  # environment variable with a LookRequest as JSON
LAYER = re.compile(r"^\w+(?:\.\d+)?")  # in the name of a parameter, as in blocks.0


@dataclass(frozen=True)
class LookRequest:
    """A step to look at, and what to find there."""

    step: int
    path: str  # where rank zero writes what it finds, as JSON
    # Number of a sequence to leave out in a second rehearsal. Number 1 has the highest loss.
    without: int | None


def requested_look(train_step: TrainStep) -> Callable[[int], None]:
    """Return a function to call before each step is trained. It looks at the requested step."""
    text = os.environ.get(LOOK)
    return Look(train_step, LookRequest(**json.loads(text))) if text else lambda step: None


class Look:
    """Look at one step."""

    def __init__(self, train_step: TrainStep, request: LookRequest) -> None:
        """
        Raises:
            ConfigError: The run has no sequences of a text, or too few.
        """
        task = train_step.task
        loader = train_step.loader
        if not isinstance(task, LanguageModel) or not isinstance(loader, TokenLoader):
            raise ConfigError(f"task.name={task.config.task.name} has no sequences of a text")
        size = train_step.plan.batch_size
        check((request.without or 1) <= size, f"without={request.without} must be at most {size}")
        self.train_step = train_step
        self.request = request
        self.task = task
        self.loader = loader

    def __call__(self, step: int) -> None:
        """Write what is found at the requested step. A collective."""
        request = self.request
        if step != request.step:
            return
        this = self.train_step
        this.runtime.group.set_activity(f"looking at step {step}")
        losses, found = self._rehearse()
        # NaN, which no number equals, counts as the highest loss.
        order = sorted(losses, key=lambda i: (losses[i] == losses[i], -losses[i]))
        if request.without is not None:
            _, found["without"] = self._rehearse(left_out=order[request.without - 1])
        this.runtime.group.run_on_rank_zero(lambda: self._write(found, losses, order))

    def _rehearse(self, left_out: int | None = None) -> tuple[dict[int, float], dict[str, Any]]:
        """Run the passes of the step, measure the gradients, and drop them.

        Args:
            left_out: Index of a sequence in the batch that does not count.

        Returns:
            The loss of each sequence by its index in the batch. Then the mean loss and the gradient
            norms, before the user's hooks change the gradients.
        """
        this = self.train_step
        losses: dict[int, float] = {}
        n_counted = this.plan.batch_size - (left_out is not None)

        def measure(micro: MicroBatch, batch: Any) -> Outputs:
            """Let the task compute the loss of each sequence from logits of one forward pass."""
            total = torch.zeros((), device=this.runtime.device)
            logits = this.parallel_model(self.task.in_ids_of_model(batch)[0])  # (B, T, V)
            rows = zip(*[each.split(1) for each in (logits, *batch)], strict=True)
            for index, (row, *sequence) in enumerate(rows, micro.index * len(logits)):
                outputs = outputs_of(self.task.loss(_KnownOutput(row), tuple(sequence)), this.model)
                loss = outputs.losses["loss"]
                losses[index] = float(loss)
                total = total + loss * (index != left_out)
            # The step takes the mean over its micro-batches.
            mean = total * this.plan.n_micro / n_counted
            return replace(outputs, losses={**outputs.losses, "loss": mean})

        with kept_buffers(this.model):
            this.passes(self.request.step, measure)
        layers: dict[str, list[Tensor]] = {}
        for name, parameter in this.model.named_parameters():
            if parameter.grad is not None:
                layers.setdefault(LAYER.findall(name)[0], []).append(parameter.grad)
        norms = {}
        for layer, gradients in layers.items():
            norm = this.strategy.total_norm(gradients) / this.runtime.scaler.get_scale()
            norms[layer] = float(norm)
        this.optimizer.zero_grad(set_to_none=True)
        for other in this.runtime.group.all_gather([*losses.items()]):
            losses.update(other)
        mean = sum(loss for index, loss in losses.items() if index != left_out) / n_counted
        return losses, {"loss": mean, "grad_norm": math.hypot(*norms.values()), "layers": norms}

    def _write(self, found: dict[str, Any], losses: dict[int, float], order: list[int]) -> None:
        """Write what was found, and the sequences in this order."""
        step = self.request.step
        task = self.task
        size = self.train_step.plan.batch_size
        [whole] = self.loader.get_batch(step, BatchPlan(size, size, world_size=1), rank=0)
        tokens, targets = task.in_ids_of_model(whole.batch)
        ids = torch.cat([tokens, targets[:, -1:]], dim=1).tolist()
        cache = TextCache(task.config.data)
        origins = find_origins(task.text, cache, self.loader.starts(step), len(ids[0]))
        can_decode = not isinstance(task.tokenizer, NoTokenizer)
        found["sequences"] = [
            {
                "loss": losses[index],
                "sources": [asdict(origin) for origin in origins[index]],
                "text": task.tokenizer.decode(ids[index]) if can_decode else "",
                "tokens": ids[index],
            }
            for index in order
        ]
        Path(self.request.path).write_text(json.dumps(found))


class _KnownOutput(nn.Module):
    """Stands for a language model whose logits are known."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.logits if targets is None else cross_entropy(self.logits, targets)
