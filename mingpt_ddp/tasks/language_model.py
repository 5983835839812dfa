"""Language modelling: predict each token of a text from those before it.

Shapes: B sequences, T tokens, V = vocab_size.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.keys.model_config import TransformerConfig, model_label
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.dataloader import TokenLoader, TokenSplit
from mingpt_ddp.data.dataset import EncodedText, RecordedText, TextDataset
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.rng import derive_seed
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import (
    BPETokenizer,
    CharTokenizer,
    NoTokenizer,
    tokenizer_from_state,
)
from mingpt_ddp.data.tokenizers.tokenizer_base import Tokenizer
from mingpt_ddp.data.weighted import WeightedLoader
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.inference.generate import SamplingParams, generate_text
from mingpt_ddp.models.ops import cross_entropy
from mingpt_ddp.tasks.causality import check_is_causal_lm, check_shapes, draw_weights
from mingpt_ddp.tasks.recorded_text import recorded_text
from mingpt_ddp.tasks.task import Mean, Task

log = logging.getLogger(__name__)

NATS_PER_BIT = math.log(2)
UNITS = {"char": "character", "byte": "byte", "bpe": "token", "none": "token"}
SAMPLE_CHARACTERS = 400
TRIAL_ROWS = 2  # sequences of a trial batch
TRIAL_LENGTH = 64  # tokens of each


class LanguageModel(Task):
    """Cross-entropy in nats per token.

    The model has the interface of `mingpt_ddp.models.LanguageModel`.
    """

    unit = "tokens"
    comparable = ("bits_per_byte", "bits_per_char")  # between tokenizers
    _notes: tuple[str, ...] = ()  # lines for the log: how the texts are read
    _ids: Tensor | None = None  # the model's id of each token of the text, where they differ
    _lengths: "_TokenLengths | None" = None  # of the tokenizer, once it is needed

    def __init__(
        self,
        config: Config,
        group: ProcessGroup,
        state: Any = None,
        recorded: RecordedText | None = None,
    ) -> None:
        """Encode the texts once per node.

        Args:
            state: Untrusted state in a snapshot, whose tokenizer is kept. None builds
                `data.tokenizer`.
            recorded: The text of the snapshot that the run resumes from, if it has one.

        Raises:
            ConfigError: the configuration selects a dataset of samples.
            DataError: the text cannot be read.
        """
        if not isinstance(config.data, DataConfig):
            raise ConfigError(
                f"task.name={config.task.name} needs a text; for "
                f"data.dataset={config.data.dataset} add a task and a model "
                "of yours (docs/your-own-model.md)"
            )
        self.config = config
        self.group = group
        try:
            tokenizer = tokenizer_from_state(state) if state else None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SnapshotError(f"the snapshot has an invalid state: {str(error)[:200]}") from error

        self._cache = TextCache(config.data)

        def encode() -> dict[str, Any]:
            texts = prepare_all(config.data, tokenizer, self._cache, recorded)
            return {name: asdict(text) for name, text in texts.items()}

        source = "data.sources" if config.data.sources else config.data.source
        described = group.prepare_on_each_node(encode, f"reading and encoding {source}")
        texts = {name: build(EncodedText, text, "") for name, text in described.items()}
        self._notes = tuple(note for text in texts.values() for note in text.notes)
        self.text = texts.pop("")
        self.dataset = TextDataset(self.text, config.data)
        self.sha256 = self.text.sha256
        self.val_texts: dict[str, Any] = {}  # further texts to evaluate, tokens by split name
        for name, text in texts.items():
            self.val_texts[f"val_{name}"] = TextDataset(text, config.data).whole
        group.barrier()  # `discard` deletes new files: let every rank open them first
        self.shape = self.tokenizer.vocab_size, config.data.block_size

    @classmethod
    def build(cls, config: Config, group: ProcessGroup, kept: dict[str, Any]) -> Task:
        """Keep a tokenizer that was trained or given: the source may be gone."""
        is_given = "tokenizer" in kept
        if isinstance(config.data, DataConfig) and "vocabulary" in kept:  # else the text's own
            is_given = config.data.format == "tokens" or config.data.tokenizer != "char"
        return cls(config, group, kept if is_given else None, recorded_text(kept))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, which a snapshot keeps."""
        return self.dataset.tokenizer

    def discard(self) -> None:
        self._cache.discard()

    def train_loader(self, device: torch.device) -> TokenLoader:
        data = self.config.data
        batch_size = self.config.trainer.batch_size
        seed = self.config.run.seed
        self.dataset.check_lengths(data.block_size)
        tokens = self.dataset.train
        if data.sources:
            sizes = self.dataset.train_sizes
            return WeightedLoader(tokens, sizes, data, batch_size, seed, device)
        return TokenLoader(tokens, data.block_size, data.stride, batch_size, seed, device)

    def set_outputs(self, outputs: int) -> None:
        self.shape = (outputs, self.shape[1])

    def split_names(self) -> list[str]:
        return [*super().split_names(), *self.val_texts]

    def split(self, name: str, device: torch.device) -> TokenSplit | None:
        splits = {"val": self.dataset.val, "test": self.dataset.test, **self.val_texts}
        tokens = splits[name]
        if len(tokens) < 2:
            return None
        steps = None if name == "test" else self.config.trainer.eval_steps
        windows = steps and steps * self.config.trainer.batch_size
        return TokenSplit(tokens, self.config.data.block_size, device, windows)

    def _unit(self) -> str:
        """Return what the loss is the mean of; the end of a document is no character."""
        tokenizer = self.tokenizer
        return UNITS[tokenizer.name] if tokenizer.end is None else "token"

    def data_notes(self) -> list[str]:
        return [*self._notes]

    def describe_data(self) -> str:
        splits = {
            "training": self.dataset.train,
            "validation": self.dataset.val,
            "test": self.dataset.test,
        }
        counts = [f"{len(tokens):,} {name}" for name, tokens in splits.items() if len(tokens)]
        *first, last = counts
        tokenizer = self.tokenizer
        unit = self._unit()
        sizes = f"{', '.join(first)} and {last} {unit}s"
        text = f"{self.config.data.label}: {sizes}, {tokenizer.vocab_size} distinct"
        if isinstance(tokenizer, NoTokenizer):
            text += "; without data.tokenizer there are no samples and no bits per byte"
        return text

    def state(self) -> dict[str, Any]:
        text: dict[str, Any] = {"sha256": self.text.sha256, "length": self.text.length}
        if self.text.form != "text":  # as in earlier versions
            text["format"] = self.text.form
        return {**self.tokenizer.state(), "text": text}

    def extend(self, state: dict[str, Any]) -> None:
        """Take the tokenizer of the snapshot; characters that it lacks are added at its end.

        Raises:
            ConfigError: the text was encoded by a tokenizer of another kind.
        """
        known = tokenizer_from_state(state)
        encoded_by = self.tokenizer
        if encoded_by.end is not None:
            known = known.with_end()
        if isinstance(known, CharTokenizer) and isinstance(encoded_by, CharTokenizer):
            new = "".join(c for c in encoded_by.vocabulary if c not in known.index)
            known = CharTokenizer(known.vocabulary + new)
            ids = known.encode(encoded_by.vocabulary)
            is_same = ids == list(range(len(ids)))
            self._ids = None if is_same else torch.tensor(ids)
        elif known.state() != encoded_by.state():
            raise ConfigError(
                f"the weights have a {known.name} tokenizer, the text a {encoded_by.name} tokenizer"
            )
        self.dataset.tokenizer = known
        self.shape = (known.vocab_size, self.shape[1])

    def files(self) -> dict[str, str]:
        tokenizer = self.tokenizer
        if isinstance(tokenizer, BPETokenizer):
            return {"tokenizer.json": tokenizer.json}
        return {}

    def adopt(self, state: dict[str, Any], is_other_data: bool) -> None:
        """Evaluate other data as a whole.

        Raises:
            DataError: the text has changed.
        """
        super().adopt(state, is_other_data)
        known = tokenizer_from_state(state)
        encoded_by = self.tokenizer
        if isinstance(known, CharTokenizer) and isinstance(encoded_by, CharTokenizer):
            known.encode(encoded_by.vocabulary)
        self.extend(state)
        if is_other_data:
            self.dataset.val = self.dataset.whole
            self.dataset.test = self.dataset.whole

    def in_ids_of_model(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Replace the text's ids in tokens and targets (B, T) by the model's, where they differ.

        They do after a start from weights of another text; a `loss` of your own begins with this.
        """
        if self._ids is None:
            return batch
        tokens, targets = batch
        self._ids = self._ids.to(tokens.device)
        return self._ids[tokens], self._ids[targets]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = self.in_ids_of_model(batch)  # each (B, T)
        smoothing = getattr(self.config.task, "label_smoothing", 0.0)
        if smoothing:
            logits = model(tokens)  # (B, T, V)
            return cross_entropy(logits, targets, smoothing)
        loss: Tensor = model(tokens, targets)
        return loss

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        tokens, targets = self.in_ids_of_model(batch)  # each (B, T)
        return self.measure(model(tokens), targets)

    def measure(self, logits: Tensor, targets: Tensor) -> dict[str, Mean]:
        """Return what evaluation measures: sums over the batch, each with its number of items.

        A task of your own adds metrics here. They cost no second forward pass.

        Args:
            logits: Logits of the batch (B, T, V), which the model has computed.
            targets: Next tokens (B, T), as ids of `self.tokenizer`.
        """
        n = targets.numel()
        correct = (logits.argmax(dim=-1) == targets).sum()
        nats = cross_entropy(logits, targets).double() * n
        measured: dict[str, Mean] = {"loss": (nats, n), "accuracy": (correct, n)}

        tokenizer = self.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            return measured
        if self._lengths is None or self._lengths.tokenizer is not tokenizer:
            self._lengths = _TokenLengths(tokenizer)
        n_bytes, n_characters = self._lengths.total(targets)
        bits = nats / NATS_PER_BIT
        return {**measured, "bits_per_byte": (bits, n_bytes), "bits_per_char": (bits, n_characters)}

    def describe(self, metrics: Mapping[str, float]) -> str:
        unit = self._unit()
        nats = metrics["loss"]
        texts = [f"loss {nats:.4f} nats ({nats / NATS_PER_BIT:.4f} bits) per {unit}"]
        if "bits_per_byte" in metrics:
            texts.append(f"{metrics['bits_per_byte']:.4f} bits per byte")
        hidden = {"loss", *self.comparable}
        for split in self.val_texts:
            prefix = split.removeprefix("val_")
            hidden |= {f"{prefix}_{name}" for name in ("accuracy", *self.comparable)}
        for name, value in metrics.items():
            if name not in hidden:
                texts.append(f"{name} {value:.4f}")
        return ", ".join(texts)

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Generate a text on rank zero, keyed by the seed and the step.

        Return None on other ranks, and without a tokenizer.
        """
        tokenizer = self.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            return None
        seed = derive_seed("sample", self.config.run.seed, step)
        sampling = SamplingParams(temperature=0.8, top_k=40)

        def generate() -> str:
            [text] = generate_text(model, tokenizer, "", SAMPLE_CHARACTERS, sampling, seed)
            return text

        return self.group.env.call_on_rank_zero(generate)

    def trial_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        tokens = tokens[:TRIAL_ROWS, :TRIAL_LENGTH].contiguous()
        targets = targets[:TRIAL_ROWS, :TRIAL_LENGTH].contiguous()
        return tokens, targets

    def check_model(self, model: nn.Module, batch: tuple[Tensor, Tensor], trained: bool) -> None:
        tokens, targets = batch
        name = model_label(self.config.model)
        vocab_size, _ = self.shape
        if not trained:
            check_shapes(model, name, vocab_size, tokens, targets)
            return self.check_measured(model, self.trial_batch(batch))
        check_is_causal_lm(model, name, vocab_size, tokens, targets)
        if isinstance(self.config.model, TransformerConfig):  # the trial has no use for it anymore
            draw_weights(model)
            check_is_causal_lm(model, name, vocab_size, tokens, targets)


class _TokenLengths:
    """The bytes and characters of tokens; the tables stay on the device of the latest tokens.

    Copying them for each batch would wait for a GPU each time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._sizes = torch.from_numpy(tokenizer.token_sizes)  # (V,)
        self._characters = torch.from_numpy(tokenizer.token_characters)  # (V,)

    def total(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes and the characters of all tokens together."""
        self._sizes = self._sizes.to(tokens.device)
        self._characters = self._characters.to(tokens.device)
        return self._sizes[tokens].sum(), self._characters[tokens].sum()
