"""Language modelling: predict each token of a text from the tokens before it.

Shapes: B sequences, T tokens, V = vocab_size.
"""

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
from mingpt_ddp.tasks.outputs import Returned
from mingpt_ddp.tasks.recorded_text import recorded_text
from mingpt_ddp.tasks.task import Mean, Task

NATS_PER_BIT = math.log(2)
UNITS = {"char": "character", "byte": "byte", "bpe": "token", "none": "token"}
SAMPLE_CHARACTERS = 400
TRIAL_SEQUENCES = 2
TRIAL_TOKENS = 64  # number of tokens in each sequence of a trial batch


class LanguageModel(Task):
    """The task of a language model. Its loss is the cross-entropy in nats per token.

    The model has the interface of `mingpt_ddp.models.ModelProtocol`.
    """

    unit = "tokens"
    # Metrics that do not depend on the tokenizer, so that runs with different tokenizers can be
    # compared.
    comparable = ("bits_per_byte", "bits_per_char")
    _notes: tuple[str, ...] = ()  # log lines that say how the texts are read
    # Maps the id of each token in the text to its id in the model. None if both are the same.
    _model_ids: Tensor | None = None
    # Lengths of the tokenizer's tokens. None until an evaluation needs them.
    _lengths: "_TokenLengths | None" = None

    def __init__(
        self,
        config: Config,
        group: ProcessGroup,
        state: Any = None,
        recorded: RecordedText | None = None,
    ) -> None:
        """Encode the texts once per node. A collective.

        Args:
            state: Untrusted state.json of a snapshot whose tokenizer to use. None builds the
                tokenizer that `data.tokenizer` selects.
            recorded: The hash and the format of the run's text, from the snapshot to resume. None
                for a new run.

        Raises:
            ConfigError: The configuration selects a dataset of samples (data.dataset) instead of a
                text.
            DataError: The text cannot be read.
        """
        if not isinstance(config.data, DataConfig):
            raise ConfigError(
                f"task.name={config.task.name} needs a text; for "
                f"data.dataset={config.data.dataset} write your own task and model "
                "(docs/your-own-model.md)"
            )
        self.config = config
        self.group = group
        try:
            tokenizer = tokenizer_from_state(state) if state else None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SnapshotError(
                f"the snapshot has an invalid state: {str(error)[:200]}; use another snapshot"
            ) from error

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
        # The tokens of the additional validation texts (data.val_paths), by the name of their
        # split.
        self.val_texts: dict[str, Any] = {}
        for name, text in texts.items():
            self.val_texts[f"val_{name}"] = TextDataset(text, config.data).whole
        # `discard` may delete the new files of the cache. Every rank must have opened them first.
        group.barrier()
        self.shape = self.tokenizer.vocab_size, config.data.block_size

    @classmethod
    def build(cls, config: Config, group: ProcessGroup, recorded_state: dict[str, Any]) -> Task:
        """Build the task with the tokenizer of the snapshot, or with one made from the text.

        The files of a tokenizer that was trained, or given by the user, may be gone, so it is taken
        from the snapshot. A character tokenizer (data.tokenizer=char) is made from the text again.
        """
        uses_recorded = "tokenizer" in recorded_state
        if isinstance(config.data, DataConfig) and "vocabulary" in recorded_state:
            uses_recorded = config.data.format == "tokens" or config.data.tokenizer != "char"
        state = recorded_state if uses_recorded else None
        return cls(config, group, state, recorded_text(recorded_state))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Snapshots save it."""
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

    def _loss_unit(self) -> str:
        """Return the word for one item of the mean loss, such as "character" or "token".

        If the tokenizer has an end token, the word is "token", since the end of a document is not
        a character.
        """
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
        unit = self._loss_unit()
        sizes = f"{', '.join(first)} and {last} {unit}s"
        text = f"{self.config.data.label}: {sizes}, {tokenizer.vocab_size} distinct"
        if isinstance(tokenizer, NoTokenizer):
            text += "; without data.tokenizer there are no samples and no bits per byte"
        return text

    def state(self) -> dict[str, Any]:
        text: dict[str, Any] = {"sha256": self.text.sha256, "length": self.text.length}
        if self.text.form != "text":  # earlier versions know only this format, and do not record it
            text["format"] = self.text.form
        return {**self.tokenizer.state(), "text": text}

    def extend(self, state: dict[str, Any]) -> None:
        """Use the tokenizer of the snapshot, extended by the characters that the text adds.

        Raises:
            ConfigError: The text was encoded by a different tokenizer. Only a tokenizer of
                characters can be extended.
        """
        saved = tokenizer_from_state(state)
        current = self.tokenizer
        if current.end is not None:
            saved = saved.with_end()
        if isinstance(saved, CharTokenizer) and isinstance(current, CharTokenizer):
            new = "".join(c for c in current.vocabulary if c not in saved.index)
            saved = CharTokenizer(saved.vocabulary + new)
            ids = saved.encode(current.vocabulary)
            is_same = ids == list(range(len(ids)))
            self._model_ids = None if is_same else torch.tensor(ids)
        elif saved.state() != current.state():
            raise ConfigError(
                f"the weights were trained with a {saved.name} tokenizer, but the text is encoded "
                f"with a different {current.name} tokenizer; set data.tokenizer to the tokenizer "
                "of the weights"
            )
        self.dataset.tokenizer = saved
        self.shape = (saved.vocab_size, self.shape[1])

    def files(self) -> dict[str, str]:
        tokenizer = self.tokenizer
        if isinstance(tokenizer, BPETokenizer):
            return {"tokenizer.json": tokenizer.json}
        return {}

    def adopt(self, state: dict[str, Any], is_other_data: bool) -> None:
        """Prepare to evaluate a snapshot's model.

        A text that is not the text of the run is evaluated completely, instead of only its
        validation or test split.

        Raises:
            DataError: The text has changed since the run.
        """
        super().adopt(state, is_other_data)
        saved = tokenizer_from_state(state)
        current = self.tokenizer
        if isinstance(saved, CharTokenizer) and isinstance(current, CharTokenizer):
            saved.encode(current.vocabulary)  # raises an error for an unknown character
        self.extend(state)
        if is_other_data:
            self.dataset.val = self.dataset.whole
            self.dataset.test = self.dataset.whole

    def in_ids_of_model(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Translate tokens and targets (B, T) from the ids of the text to the ids of the model.

        They differ if the run starts from weights that were trained on a different text. Begin a
        `loss` of your own with this call.
        """
        if self._model_ids is None:
            return batch
        tokens, targets = batch
        self._model_ids = self._model_ids.to(tokens.device)
        return self._model_ids[tokens], self._model_ids[targets]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Returned:
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
        """Compute the metrics of evaluation: sums over the batch, each with its number of items.

        Override this to add metrics to a task of your own. They need no second forward pass.

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
        unit = self._loss_unit()
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
        """Generate a text on rank zero. Its random numbers depend on the seed and the step only.

        Return None on the other ranks, and if there is no tokenizer.
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
        tokens = tokens[:TRIAL_SEQUENCES, :TRIAL_TOKENS].contiguous()
        targets = targets[:TRIAL_SEQUENCES, :TRIAL_TOKENS].contiguous()
        return tokens, targets

    def check_model(self, model: nn.Module, batch: tuple[Tensor, Tensor], trained: bool) -> None:
        tokens, targets = batch
        name = model_label(self.config.model)
        vocab_size, _ = self.shape
        if not trained:
            check_shapes(model, name, vocab_size, tokens, targets)
            return self.check_measured(model, self.trial_batch(batch))
        check_is_causal_lm(model, name, vocab_size, tokens, targets)
        if isinstance(self.config.model, TransformerConfig):
            draw_weights(model)  # the dry run does not use the model after this check
            check_is_causal_lm(model, name, vocab_size, tokens, targets)


class _TokenLengths:
    """Counts the bytes and characters of tokens.

    Its tables stay on the device of the latest tokens, because copying them to a GPU for each batch
    would wait for the GPU each time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._sizes = torch.from_numpy(tokenizer.token_sizes)  # (V,)
        self._characters = torch.from_numpy(tokenizer.token_characters)  # (V,)

    def total(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the total number of bytes, and of characters, of all tokens."""
        self._sizes = self._sizes.to(tokens.device)
        self._characters = self._characters.to(tokens.device)
        return self._sizes[tokens].sum(), self._characters[tokens].sum()
