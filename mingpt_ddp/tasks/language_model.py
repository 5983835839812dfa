"""Language modelling: predict each token of a text from those before it.

Shapes: B sequences, T tokens, V = vocab_size.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import TokenLoader, TokenSplit
from mingpt_ddp.data.dataset import EncodedText, TextDataset
from mingpt_ddp.data.prepare import prepare
from mingpt_ddp.data.rng import derive_seed
from mingpt_ddp.data.tokenizer import CharTokenizer, tokenizer_from_state
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import SamplingParams, generate_text
from mingpt_ddp.models.ops import cross_entropy
from mingpt_ddp.tasks.causality import check_is_causal_lm, check_shapes
from mingpt_ddp.tasks.task import Mean, Task

NATS_PER_BIT = math.log(2)
SAMPLE_CHARACTERS = 400
TRIAL_ROWS, TRIAL_LENGTH = 2, 64  # sequences, and tokens of each


class LanguageModel(Task):
    """Cross-entropy in nats per token; the model has the interface of `mingpt_ddp.models.LanguageModel`."""

    unit = "tokens"

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        """Encode the text once per node.

        Raises:
            ConfigError: the configuration selects a dataset of samples.
            DataError: the text cannot be read.
        """
        if not isinstance(config.data, DataConfig):
            raise ConfigError(
                f"task.name={config.task.name} needs a text; for data.dataset={config.data.dataset} add a task and a "
                "model, as in task=classification model=convnet"
            )
        self.config, self.group = config, group
        self.text = EncodedText(**group.run_on_rank_zero(lambda: asdict(prepare(config.data)), per_node=True))
        self.dataset, self.sha256 = TextDataset(self.text, config.data), self.text.sha256
        self.shape = self.dataset.tokenizer.vocab_size, config.data.block_size
        self._ids: Tensor | None = None  # the model's id of each token of the text, where they differ

    def train_loader(self, device: torch.device) -> TokenLoader:
        data, batch_size = self.config.data, self.config.trainer.batch_size
        self.dataset.check_lengths(data.block_size)
        return TokenLoader(self.dataset.train, data.block_size, data.stride, batch_size, self.config.run.seed, device)

    def split(self, name: str, device: torch.device) -> TokenSplit | None:
        tokens = self.dataset.val if name == "val" else self.dataset.test
        steps = self.config.trainer.eval_steps if name == "val" else None
        windows = steps and steps * self.config.trainer.batch_size
        return TokenSplit(tokens, self.config.data.block_size, device, windows) if len(tokens) > 1 else None

    def describe_data(self) -> str:
        parts = {"training": self.dataset.train, "validation": self.dataset.val, "test": self.dataset.test}
        *first, last = [f"{len(tokens):,} {name}" for name, tokens in parts.items() if len(tokens)]
        sizes = f"{', '.join(first)} and {last} characters"
        return f"{self.config.data.label}: {sizes}, {self.dataset.tokenizer.vocab_size} distinct"

    def state(self) -> dict[str, Any]:
        text = {"sha256": self.text.sha256, "length": self.text.length}
        return {**self.dataset.tokenizer.state(), "text": text}

    def extend(self, state: dict[str, Any]) -> None:
        """Take the tokenizer of the snapshot; characters that it lacks are added at its end.

        Raises:
            ConfigError: the text was encoded by a tokenizer of another kind.
        """
        known, own = tokenizer_from_state(state), self.dataset.tokenizer
        if isinstance(known, CharTokenizer) and isinstance(own, CharTokenizer):
            known = CharTokenizer(known.vocabulary + "".join(c for c in own.vocabulary if c not in known.index))
            ids = known.encode(own.vocabulary)
            self._ids = None if ids == [*range(len(ids))] else torch.tensor(ids)
        elif known.state() != own.state():
            raise ConfigError(f"the weights have a {known.name} tokenizer, the text a {own.name} tokenizer")
        self.dataset.tokenizer, self.shape = known, (known.vocab_size, self.shape[1])

    def adopt(self, state: dict[str, Any], is_other_data: bool) -> None:
        """Take the vocabulary of the snapshot; other data is evaluated as a whole.

        Raises:
            DataError: the text has changed, or has characters that the model does not know.
        """
        super().adopt(state, is_other_data)
        tokenizer = tokenizer_from_state(state)
        tokenizer.encode(self.dataset.tokenizer.decode([*range(self.shape[0])]))
        self.extend(state)
        if is_other_data:
            parts = [self.dataset.train, self.dataset.val, self.dataset.test]
            self.dataset.val = self.dataset.test = np.concatenate(parts)

    def _in_ids_of_model(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self._ids is None:
            return batch
        self._ids = self._ids.to(batch[0].device)
        return self._ids[batch[0]], self._ids[batch[1]]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch = self._in_ids_of_model(batch)
        if smoothing := getattr(self.config.task, "label_smoothing", 0.0):
            return cross_entropy(model(batch[0]), batch[1], smoothing)
        loss: Tensor = model(*batch)
        return loss

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        tokens, targets = self._in_ids_of_model(batch)
        logits = model(tokens)
        correct = (logits.argmax(dim=-1) == targets).sum()
        n = targets.numel()
        return {"loss": (cross_entropy(logits, targets).double() * n, n), "accuracy": (correct, n)}

    def derive(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"bits_per_char": metrics["loss"] / NATS_PER_BIT}

    def describe(self, metrics: Mapping[str, float]) -> str:
        bits, accuracy = metrics["bits_per_char"], metrics["accuracy"]
        return f"loss {metrics['loss']:.4f} nats ({bits:.4f} bits) per character, accuracy {accuracy:.4f}"

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Generate a text on rank zero, keyed by the seed and the step; return None on other ranks."""
        seed, sampling = derive_seed("sample", self.config.run.seed, step), SamplingParams(temperature=0.8, top_k=40)
        generate = partial(generate_text, model, self.dataset.tokenizer, "", SAMPLE_CHARACTERS, sampling, seed)
        return self.group.env.call_on_rank_zero(lambda: generate()[0])

    def trial_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = (part[:TRIAL_ROWS, :TRIAL_LENGTH].contiguous() for part in batch)
        return x, y

    def check_model(self, model: nn.Module, batch: tuple[Tensor, Tensor], trained: bool) -> None:
        check = check_is_causal_lm if trained else check_shapes
        check(model, self.config.model.architecture, self.shape[0], *batch)
