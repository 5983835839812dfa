"""Look at a step of a repeated run: the loss of each sequence, and the gradient norm of each layer.

Just before the run trains the step, it runs the forward and backward passes of the step once (a
rehearsal). It measures the gradients of the rehearsal, and drops them. Then it trains the step.
The training is bit-identical with and without the rehearsal.
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
from mingpt_ddp.training.hooks.actions import gradients_of
from mingpt_ddp.training.train_step import TrainStep

# Environment variable that asks a training process for a look. It has a LookRequest as JSON.
LOOK = "MINGPT_DDP_LOOK"
# The layer at the start of a parameter's name: blocks.0 in blocks.0.up.weight.
LAYER = re.compile(r"^\w+(?:\.\d+)?")


@dataclass(frozen=True)
class LookRequest:
    """A step to look at, and where to write the result."""

    step: int
    path: str  # file to which rank zero writes the result as JSON
    # Number of the sequence to leave out in a second rehearsal; number 1 has the highest loss. None
    # for a single rehearsal.
    without: int | None


def requested_look(train_step: TrainStep) -> Callable[[int], None]:
    """Return a function to call before each step is trained.

    It looks at the step that the environment asks for, and does nothing at any other step.
    """
    text = os.environ.get(LOOK)
    return Look(train_step, LookRequest(**json.loads(text))) if text else lambda step: None


class Look:
    """Rehearses the requested step, and writes the measurements to a file."""

    def __init__(self, train_step: TrainStep, request: LookRequest) -> None:
        """
        Raises:
            ConfigError: The run does not train on sequences of a text, or its batch has fewer
                sequences than the number to leave out.
        """
        task = train_step.task
        loader = train_step.loader
        if not isinstance(task, LanguageModel) or not isinstance(loader, TokenLoader):
            raise ConfigError(
                f"task.name={task.config.task.name} does not train on sequences of a text, so its "
                "steps cannot be shown"
            )
        size = train_step.plan.batch_size
        check(
            (request.without or 1) <= size,
            f"without={request.without} must be at most {size}, the number of sequences in a batch",
        )
        check(
            request.without is None or size > 1,
            f"without={request.without} would leave no sequence in a batch of one; remove the key",
        )
        self.train_step = train_step
        self.request = request
        self.task = task
        self.loader = loader

    def __call__(self, step: int) -> None:
        """Look at this step if it is the requested one, and write the result. A collective."""
        request = self.request
        if step != request.step:
            return
        train_step = self.train_step
        train_step.runtime.group.set_activity(f"looking at step {step}")
        losses, results = self._rehearse()
        # NaN counts as the highest loss. It is the only number that does not equal itself.
        order = sorted(losses, key=lambda i: (losses[i] == losses[i], -losses[i]))
        if request.without is not None:
            _, results["without"] = self._rehearse(left_out=order[request.without - 1])
        train_step.runtime.group.run_on_rank_zero(lambda: self._write(results, losses, order))

    def _rehearse(self, left_out: int | None = None) -> tuple[dict[int, float], dict[str, Any]]:
        """Run the passes of the step, measure the gradients, and drop them.

        Args:
            left_out: Index in the batch of the sequence to leave out of the mean loss, and
                therefore out of the gradients. None to use all sequences.

        Returns:
            The loss of each sequence by its index in the batch. And the results for the whole step:
            the mean loss, and the gradient norms before the user's hooks change gradients.
        """
        train_step = self.train_step
        losses: dict[int, float] = {}
        n_counted = train_step.plan.batch_size - (left_out is not None)

        def measure(micro: MicroBatch, batch: Any) -> Outputs:
            """Compute the loss of each sequence of a micro-batch from one forward pass."""
            total = torch.zeros((), device=train_step.runtime.device)
            logits = train_step.parallel_model(self.task.in_ids_of_model(batch)[0])  # (B, T, V)
            rows = zip(*[each.split(1) for each in (logits, *batch)], strict=True)
            for index, (row, *sequence) in enumerate(rows, micro.index * len(logits)):
                outputs = outputs_of(
                    self.task.loss(_KnownOutput(row), tuple(sequence)), train_step.model
                )
                loss = outputs.losses["loss"]
                losses[index] = float(loss)
                total = total + loss * (index != left_out)
            # The step takes the mean over its micro-batches.
            mean = total * train_step.plan.n_micro / n_counted
            return replace(outputs, losses={**outputs.losses, "loss": mean})

        with kept_buffers(train_step.model):
            train_step.passes(self.request.step, measure)
        layers: dict[str, list[Tensor]] = {}
        for name, gradient in gradients_of(train_step.model).items():
            layers.setdefault(LAYER.findall(name)[0], []).append(gradient)
        norms = {}
        for layer, gradients in layers.items():
            norm = train_step.strategy.total_norm(gradients) / train_step.runtime.scaler.get_scale()
            norms[layer] = float(norm)
        train_step.optimizer.zero_grad(set_to_none=True)
        for other in train_step.runtime.group.all_gather([*losses.items()]):
            losses.update(other)
        mean = sum(loss for index, loss in losses.items() if index != left_out) / n_counted
        return losses, {"loss": mean, "grad_norm": math.hypot(*norms.values()), "layers": norms}

    def _write(self, results: dict[str, Any], losses: dict[int, float], order: list[int]) -> None:
        """Write the result and the sequences.

        Args:
            results: The results for the whole step. This method adds the sequences to them.
            losses: Loss of each sequence, by its index in the batch.
            order: Indices of the sequences, in the order in which they are written.
        """
        step = self.request.step
        task = self.task
        size = self.train_step.plan.batch_size
        [whole] = self.loader.get_batch(step, BatchPlan(size, size, world_size=1), rank=0)
        tokens, targets = task.in_ids_of_model(whole.batch)
        ids = torch.cat([tokens, targets[:, -1:]], dim=1).tolist()
        cache = TextCache(task.config.data)
        origins = find_origins(task.text, cache, self.loader.starts(step), len(ids[0]))
        can_decode = not isinstance(task.tokenizer, NoTokenizer)
        results["sequences"] = [
            {
                "loss": losses[index],
                "sources": [asdict(origin) for origin in origins[index]],
                "text": task.tokenizer.decode(ids[index]) if can_decode else "",
                "tokens": ids[index],
            }
            for index in order
        ]
        Path(self.request.path).write_text(json.dumps(results))


class _KnownOutput(nn.Module):
    """Takes the place of the model if its logits are known, so that a task can compute a loss."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.logits if targets is None else cross_entropy(self.logits, targets)
