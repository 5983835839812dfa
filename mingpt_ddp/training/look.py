"""Look at a step of a repeated run: the loss of each sequence, and the gradient norm of each layer.

The step is rehearsed before it is trained. Its gradients are measured and dropped, so the training
goes on with the same bits as without a look.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch, TokenLoader
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.data.text.origins import find_origins
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer
from mingpt_ddp.errors import ConfigError, DataError
from mingpt_ddp.models.ops import cross_entropy
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.tasks.outputs import Outputs, outputs_of
from mingpt_ddp.training.train_step import TrainStep

LOOK = "MINGPT_DDP_LOOK"  # environment variable with a LookRequest as JSON
LOOK_FILE, WEIGHTS_FILE = "look.json", "before.safetensors"


@dataclass(frozen=True)
class LookRequest:
    """A step to look at, and what to find there."""

    step: int
    sha256: str  # SHA-256 of the text of the run
    directory: str  # where rank zero writes LOOK_FILE and WEIGHTS_FILE
    # Number of a sequence to leave out in a second rehearsal. Number 1 has the highest loss.
    without: int | None = None
    needs_weights: bool = False  # write the weights before the step


def requested_look(train_step: TrainStep) -> Callable[[int], None]:
    """Return a function to call before each step is trained. It looks at the requested step."""
    text = os.environ.get(LOOK)
    return Look(train_step, LookRequest(**json.loads(text))) if text else lambda step: None


class Look:
    """Look at one step."""

    def __init__(self, train_step: TrainStep, request: LookRequest) -> None:
        """
        Raises:
            ConfigError: The run does not learn from a text.
            DataError: The text has changed since the run.
        """
        task = train_step.task
        loader = train_step.loader
        if not isinstance(task, LanguageModel) or not isinstance(loader, TokenLoader):
            raise ConfigError(
                f"task.name={task.config.task.name} has no sequences of a text to look at"
            )
        if task.sha256 != request.sha256:
            raise DataError(
                f"the text has changed since the run: its SHA-256 was {request.sha256[:16]} and "
                f"is {task.sha256[:16]}; restore it"
            )
        self.train_step = train_step
        self.request = request
        self.task = task
        self.loader = loader

    def __call__(self, step: int) -> None:
        """Write what is found at the requested step. A collective."""
        request = self.request
        if step != request.step:
            return
        group = self.train_step.runtime.group
        group.set_activity(f"looking at step {step}")
        losses, found = self._rehearse()
        # NaN, which no number equals, counts as the highest loss.
        order = sorted(losses, key=lambda i: (losses[i] == losses[i], -losses[i]))
        if request.without is not None:
            _, found["without"] = self._rehearse(left_out=order[request.without - 1])
        if request.needs_weights:
            strategy = self.train_step.strategy
            strategy.on_whole_model(self.train_step.model, self.task.build_model, self._save)
        group.run_on_rank_zero(lambda: self._write(found, losses, order))

    def _rehearse(self, left_out: int | None = None) -> tuple[dict[int, float], dict[str, Any]]:
        """Run the passes of the step, measure the gradients, and drop them.

        Args:
            left_out: Index of a sequence in the batch that does not count.

        Returns:
            The loss of each sequence by its index in the batch. Then the mean loss and the gradient
            norms, before the user's hooks change the gradients.
        """
        this = self.train_step
        strategy = this.strategy
        scaler = this.runtime.scaler
        size = this.plan.micro_batch_size
        counted = this.plan.batch_size - (left_out is not None)
        buffers = [buffer.clone() for buffer in this.model.buffers()]
        found: list[tuple[int, float]] = []
        strategy.begin_step()
        for micro in this.fetch(self.request.step):
            indices = range(micro.index * size, (micro.index + 1) * size)
            with strategy.maybe_no_sync(this.parallel_model, last=micro.is_last):
                losses, outputs = self._losses(micro)
                counts = losses.new_tensor([float(index != left_out) for index in indices])
                # micro.scale is for the mean loss of a full micro-batch
                loss = (losses * counts).sum() * micro.scale * this.plan.n_micro / counted
                scaler.scale(loss).backward()
            shares = outputs.shares(micro.loss_divisor, copies=1) if micro.scale else {}
            strategy.finish(micro, shares, this.parameters)
            found += zip(indices, losses.tolist(), strict=True)
        norms = self._norms(scaler.get_scale())
        this.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(this.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        by_index = {i: loss for part in this.runtime.group.all_gather(found) for i, loss in part}
        total = sum(loss for index, loss in by_index.items() if index != left_out)
        return by_index, {"loss": total / counted, **norms}

    def _losses(self, micro: MicroBatch) -> tuple[Tensor, Outputs]:
        """Return the losses (B) of the sequences of a micro-batch, from one forward pass.

        Each is the loss that the task computes from the logits of this sequence.
        """
        this = self.train_step
        seed_everything("dropout", self.task.config.run.seed, self.request.step, micro.index)
        with this.runtime.autocast():
            batch = this.runtime.to_device(micro.batch)
            logits = this.parallel_model(self.task.in_ids_of_model(batch)[0])  # (B, T, V)
            losses = []
            for row, *sequence in zip(*[each.split(1) for each in (logits, *batch)], strict=True):
                returned = self.task.loss(_KnownOutput(row), tuple(sequence))
                outputs = outputs_of(returned, this.model)
                losses.append(outputs.losses["loss"])
        return torch.stack(losses), outputs

    def _norms(self, scale: float) -> dict[str, Any]:
        """Return the norms of the gradients, which are multiplied by `scale`. A collective."""
        layers: dict[str, list[Tensor]] = {}
        for name, parameter in self.train_step.model.named_parameters():
            if parameter.grad is not None:
                first, second, *_ = [*name.split("."), ""]
                layer = f"{first}.{second}" if second.isdigit() else first
                layers.setdefault(layer, []).append(parameter.grad)
        total_norm = self.train_step.strategy.total_norm
        norms = {name: float(total_norm(each)) / scale for name, each in layers.items()}
        return {"grad_norm": math.hypot(*norms.values()), "layers": norms}

    def _save(self, model: nn.Module) -> None:
        """Write the weights before the step, on rank zero."""
        from safetensors.torch import save_file

        weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        path = Path(self.request.directory, WEIGHTS_FILE)
        self.train_step.runtime.group.env.call_on_rank_zero(lambda: save_file(weights, path))

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
        sequences = []
        for index in order:
            sequences.append(
                {
                    "loss": losses[index],
                    "sources": [asdict(origin) for origin in origins[index]],
                    "text": task.tokenizer.decode(ids[index]) if can_decode else "",
                    "tokens": ids[index],
                }
            )
        content = json.dumps({"sequences": sequences, **found})
        Path(self.request.directory, LOOK_FILE).write_text(content)


class _KnownOutput(nn.Module):
    """Stands for a language model whose logits are known."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.logits if targets is None else cross_entropy(self.logits, targets)
