"""What a user's hook measures a model with, after an evaluation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mingpt_ddp.data.tokenizers.tokenizer_base import Tokenizer
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import SamplingParams, generate_text
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.tasks.task import Task


@dataclass(frozen=True)
class Evaluation:
    """What a hook of @acts("evaluation") gets. With fsdp each call of the model is a collective."""

    step: int
    model: nn.Module  # in evaluation mode, with its averaged weights if trainer.ema is set
    task: Task
    runtime: Runtime

    @property
    def device(self) -> torch.device:
        """Return where the model takes its inputs."""
        return self.runtime.device

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of a text.

        Raises:
            ConfigError: the task is another.
        """
        if not isinstance(self.task, LanguageModel):
            raise ConfigError(f"task={self.task.config.task.name} has no tokenizer")
        return self.task.tokenizer

    def generate(self, prompt: str, max_new_tokens: int, **sampling: Any) -> str:
        """Return the continuation of a prompt, on every rank; greedy without `temperature`.

        Args:
            sampling: `temperature`, `top_k`, `top_p`, as `mingpt_ddp.load(...).generate` takes.

        Raises:
            ConfigError: no rank holds all weights.
        """
        if self.runtime.strategy.weights != "whole":
            raise ConfigError(
                "evaluation.generate needs all weights on every rank; call evaluation.model, or "
                "use ddp.strategy=ddp or zero1"
            )
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        seed = self.task.config.run.seed
        [text] = generate_text(self.model, self.tokenizer, prompt, max_new_tokens, params, seed)
        return text
