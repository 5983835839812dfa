"""Make tiny tasks and models that need no files, and take steps with them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.model_config import GPTConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.tokenizers.tokenizer import CharTokenizer, tokenizer_from_state
from mingpt_ddp.models import count_parameters
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.training.evaluation.weight_average import WeightAverage
from mingpt_ddp.training.hooks.actions import Actions
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Trainable

ENCODED = EncodedText(
    directory="nowhere",
    sha256="1" * 64,
    length=100,
    tokenizer={"vocabulary": "abcdefgh"},
    dtype="uint8",
    tokens_sha256="2" * 64,
)


def gpt_config(**changes) -> GPTConfig:
    """Return the configuration of a tiny GPT without dropout."""
    values = {
        "name": "test",
        "architecture": "gpt",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "dropout": 0.0,
        "bias": True,
        "activation": "gelu",
    }
    return GPTConfig(**{**values, **changes})


def trainable(model, optimizer, ema: float | None = None) -> Trainable:
    """Wrap a model and its optimizer as a run does."""
    average = WeightAverage(model, ema)
    runtime = SimpleNamespace(device=torch.device("cpu"))
    return Trainable(model, optimizer, average, count_parameters(model), Actions(None, runtime))


def text_task(
    config: Config, val: np.ndarray | str = "yy", vocab_size: int = 8, encoded=ENCODED
) -> LanguageModel:
    """Return a language model task whose validation split is `val`."""
    task = object.__new__(LanguageModel)
    task.config, task.group = config, SimpleNamespace(env=DistEnv())
    task.text, task.sha256 = encoded, encoded.sha256
    tokenizer = tokenizer_from_state(encoded.tokenizer)
    if tokenizer.vocab_size != vocab_size:
        tokenizer = CharTokenizer("".join(map(chr, range(97, 97 + vocab_size))))
    task.dataset = SimpleNamespace(train="x" * 90, val=val, test="", tokenizer=tokenizer)
    task.val_texts = {}
    task.shape = vocab_size, config.data.block_size
    return task


@dataclass(frozen=True)
class Step:
    """The values that `take_step` has computed."""

    losses: dict[str, Tensor]
    grad_norm: Tensor  # norm before clipping
    lr: float


def take_step(train_step: TrainStep, step: int) -> Step:
    """Take a step as the training loop does, but without other ranks or an anomaly policy."""
    losses = train_step.passes(step)
    grad_norm = train_step.clip()
    return Step(losses, grad_norm, train_step.update(step))
