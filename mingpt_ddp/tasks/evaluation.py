"""The argument of a user's hook that measures the model after an evaluation."""

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
    """The argument of a hook of @acts("evaluation"): the model, its task and helper functions.

    With ddp.strategy=fsdp each call of the model is a collective.
    """

    step: int
    # The model is in evaluation mode. It has its averaged weights if trainer.ema is set.
    model: nn.Module
    task: Task
    runtime: Runtime

    @property
    def device(self) -> torch.device:
        """Return the device on which the model expects its inputs."""
        return self.runtime.device

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of a language model.

        Raises:
            ConfigError: The task is not a language model.
        """
        if not isinstance(self.task, LanguageModel):
            raise ConfigError(
                f"evaluation.tokenizer: task.name={self.task.config.task.name} has no tokenizer; "
                "use evaluation.tokenizer only with a language model"
            )
        return self.task.tokenizer

    def generate(self, prompt: str, max_new_tokens: int, **sampling: Any) -> str:
        """Generate the continuation of a prompt. Every rank returns the same text.

        Args:
            prompt: The text to continue.
            max_new_tokens: The number of tokens to generate.
            sampling: Values of `temperature`, `top_k` and `top_p`, which mean the same as in
                `mingpt_ddp.load(...).generate`. Without `temperature` generation is greedy.

        Raises:
            ConfigError: No rank holds all weights.
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
