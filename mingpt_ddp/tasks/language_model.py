"""Language modelling: predict each token of a text from those before it.

Shapes: B sequences, T tokens, V = vocab_size.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import TokenLoader, TokenSplit
from mingpt_ddp.data.dataset import EncodedText, TextDataset
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.rng import derive_seed
from mingpt_ddp.data.text_cache import TextCache
from mingpt_ddp.data.tokenizer import BPETokenizer, CharTokenizer, tokenizer_from_state
from mingpt_ddp.data.weighted import WeightedLoader
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.inference.generate import SamplingParams, generate_text
from mingpt_ddp.models.ops import cross_entropy
from mingpt_ddp.tasks.causality import check_is_causal_lm, check_shapes
from mingpt_ddp.tasks.task import Mean, Task

NATS_PER_BIT = math.log(2)
UNITS = {"char": "character", "byte": "byte", "bpe": "token"}
SAMPLE_CHARACTERS = 400
# sequences, and tokens of each
TRIAL_ROWS = 2
TRIAL_LENGTH = 64


class LanguageModel(Task):
    """Cross-entropy in nats per token.

    The model has the interface of `mingpt_ddp.models.LanguageModel`.
    """

    unit = "tokens"
    comparable = ("bits_per_byte", "bits_per_char")  # between tokenizers
    _ids: Tensor | None = None  # the model's id of each token of the text, where they differ

    def __init__(self, config: Config, group: ProcessGroup, state: Any = None) -> None:
        """Encode the texts once per node.

        Args:
            state: of a snapshot, untrusted, whose tokenizer is kept; None: that of
                `data.tokenizer`.

        Raises:
            ConfigError: the configuration selects a dataset of samples.
            DataError: the text cannot be read.
        """
        if not isinstance(config.data, DataConfig):
            raise ConfigError(
                f"task.name={config.task.name} needs a text; for "
                f"data.dataset={config.data.dataset} add a task and a "
                "model, as in task=classification model=convnet"
            )
        self.config = config
        self.group = group
        try:
            tokenizer = tokenizer_from_state(state) if state else None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SnapshotError(f"the snapshot has an invalid state: {str(error)[:200]}") from error

        self._cache = TextCache(config.data)

        def encode() -> dict[str, Any]:
            return {
                name: asdict(text)
                for name, text in prepare_all(config.data, tokenizer, self._cache).items()
            }

        texts = {
            name: EncodedText(**text)
            for name, text in group.run_on_rank_zero(encode, per_node=True).items()
        }
        self.text = texts.pop("")
        self.dataset = TextDataset(self.text, config.data)
        self.sha256 = self.text.sha256
        self.val_texts = {
            f"val_{name}": TextDataset(text, config.data).whole for name, text in texts.items()
        }
        self.shape = self.dataset.tokenizer.vocab_size, config.data.block_size

    @classmethod
    def build(cls, config: Config, group: ProcessGroup, kept: dict[str, Any]) -> Task:
        """Keep a tokenizer that was trained or given: the source may be gone."""
        return cls(config, group, kept) if "tokenizer" in kept else cls(config, group)

    def discard(self) -> None:
        self._cache.discard()

    def train_loader(self, device: torch.device) -> TokenLoader:
        data = self.config.data
        batch_size = self.config.trainer.batch_size
        self.dataset.check_lengths(data.block_size)
        seed = self.config.run.seed
        if data.sources:
            return WeightedLoader(
                self.dataset.train, self.dataset.train_sizes, data, batch_size, seed, device
            )
        return TokenLoader(
            self.dataset.train, data.block_size, data.stride, batch_size, seed, device
        )

    def split_names(self) -> list[str]:
        return [*super().split_names(), *self.val_texts]

    def split(self, name: str, device: torch.device) -> TokenSplit | None:
        tokens = {"val": self.dataset.val, "test": self.dataset.test, **self.val_texts}[name]
        steps = None if name == "test" else self.config.trainer.eval_steps
        windows = steps and steps * self.config.trainer.batch_size
        return (
            TokenSplit(tokens, self.config.data.block_size, device, windows)
            if len(tokens) > 1
            else None
        )

    def describe_data(self) -> str:
        parts = {
            "training": self.dataset.train,
            "validation": self.dataset.val,
            "test": self.dataset.test,
        }
        *first, last = [f"{len(tokens):,} {name}" for name, tokens in parts.items() if len(tokens)]
        tokenizer = self.dataset.tokenizer
        unit = UNITS[tokenizer.name]
        sizes = f"{', '.join(first)} and {last} {unit}s"
        return f"{self.config.data.label}: {sizes}, {tokenizer.vocab_size} distinct"

    def state(self) -> dict[str, Any]:
        text = {"sha256": self.text.sha256, "length": self.text.length}
        return {**self.dataset.tokenizer.state(), "text": text}

    def extend(self, state: dict[str, Any]) -> None:
        """Take the tokenizer of the snapshot; characters that it lacks are added at its end.

        Raises:
            ConfigError: the text was encoded by a tokenizer of another kind.
        """
        known = tokenizer_from_state(state)
        own = self.dataset.tokenizer
        if isinstance(known, CharTokenizer) and isinstance(own, CharTokenizer):
            known = CharTokenizer(
                known.vocabulary + "".join(c for c in own.vocabulary if c not in known.index)
            )
            ids = known.encode(own.vocabulary)
            self._ids = None if ids == [*range(len(ids))] else torch.tensor(ids)
        elif known.state() != own.state():
            raise ConfigError(
                f"the weights have a {known.name} tokenizer, the text a {own.name} tokenizer"
            )
        self.dataset.tokenizer = known
        self.shape = (known.vocab_size, self.shape[1])

    def files(self) -> dict[str, str]:
        tokenizer = self.dataset.tokenizer
        return {"tokenizer.json": tokenizer.json} if isinstance(tokenizer, BPETokenizer) else {}

    def adopt(self, state: dict[str, Any], is_other_data: bool) -> None:
        """Evaluate other data as a whole.

        Raises:
            DataError: the text has changed.
        """
        super().adopt(state, is_other_data)
        known = tokenizer_from_state(state)
        own = self.dataset.tokenizer
        if isinstance(known, CharTokenizer) and isinstance(own, CharTokenizer):
            known.encode(own.vocabulary)
        self.extend(state)
        if is_other_data:
            self.dataset.val = self.dataset.test = self.dataset.whole

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
        tokenizer = self.dataset.tokenizer
        nats = cross_entropy(logits, targets).double() * n
        tables = {
            "bits_per_byte": tokenizer.token_sizes,
            "bits_per_char": tokenizer.token_characters,
        }
        sizes = {
            name: torch.from_numpy(table).to(targets.device)[targets].sum()
            for name, table in tables.items()
        }
        bits = {name: (nats / NATS_PER_BIT, size) for name, size in sizes.items()}
        return {"loss": (nats, n), "accuracy": (correct, n), **bits}

    def describe(self, metrics: Mapping[str, float]) -> str:
        unit = UNITS[self.dataset.tokenizer.name]
        nats = metrics["loss"]
        loss = [f"loss {nats:.4f} nats ({nats / NATS_PER_BIT:.4f} bits) per {unit}"]
        loss += (
            [f"{metrics['bits_per_byte']:.4f} bits per byte"] if "bits_per_byte" in metrics else []
        )
        loss += [f"accuracy {metrics['accuracy']:.4f}"]
        others = [f"{name} {metrics[name]:.4f}" for name in metrics if name.endswith("_loss")]
        return ", ".join([*loss, *others])

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Generate a text on rank zero, keyed by the seed and the step.

        Return None on other ranks.
        """
        seed = derive_seed("sample", self.config.run.seed, step)
        sampling = SamplingParams(temperature=0.8, top_k=40)
        generate = partial(
            generate_text, model, self.dataset.tokenizer, "", SAMPLE_CHARACTERS, sampling, seed
        )
        return self.group.env.call_on_rank_zero(lambda: generate()[0])

    def trial_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = (part[:TRIAL_ROWS, :TRIAL_LENGTH].contiguous() for part in batch)
        return x, y

    def check_model(self, model: nn.Module, batch: tuple[Tensor, Tensor], trained: bool) -> None:
        check = check_is_causal_lm if trained else check_shapes
        check(model, self.config.model.architecture, self.shape[0], *batch)
