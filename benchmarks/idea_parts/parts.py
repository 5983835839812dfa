"""Variants of the modern architecture for benchmarks/ideas.py.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mingpt_ddp.config.keys.model_config import ModernConfig
from mingpt_ddp.models.block_parts import BlockSpec, block_spec
from mingpt_ddp.models.modern import Modern
from mingpt_ddp.models.ngrams import NGramEmbedding
from mingpt_ddp.parts import RotaryAttention, cross_entropy
from mingpt_ddp.registry import ModelConfig, PartConfig, register

GATE_INPUTS = 16  # number of channels that a gate reads
MEAN_EVERY = 25  # steps between the weights of `mean_of`


@dataclass(frozen=True)
class IdeasConfig(ModelConfig):
    n_layer: int
    n_head: int
    n_embd: int
    gates: bool = False  # gate the output of each head
    value_rows: int = 0  # rows of an n-gram table, added to the values; 0 for no table
    skips: bool = False  # add the outputs of early blocks to the inputs of late blocks
    ahead: float = 0.0  # weight of the loss of the token after the next one
    mean_of: int = 0  # evaluate the mean of the weights of so many steps; 0 for the last weights


class ChangedAttention(RotaryAttention):
    """Attention with a gate per head, and with vectors that the model adds to the values.

    Source of the gates: Jordan et al. 2024, "modded-nanogpt".
    """

    def __init__(self, has_gates: bool, block: BlockSpec) -> None:
        super().__init__(PartConfig(), block)
        self.gate = nn.Linear(GATE_INPUTS, block.n_head, bias=False) if has_gates else None
        self.added: Tensor | None = None  # (B, T, C), set by the model before each call
        self.gates: Tensor | None = None  # gates of the current call, (B, H, T, 1)

    def init_weights(self) -> None:
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)  # every gate is 1

    def forward(self, x, rotary, v1, cache, start):
        if self.gate is not None:
            gates = 2 * torch.sigmoid(self.gate(x[..., :GATE_INPUTS]))  # (B, T, H)
            self.gates = gates.transpose(1, 2)[..., None]
        return super().forward(x, rotary, v1, cache, start)

    def attend(self, q, k, v, cache=None, start=0, bias=None):
        if self.added is not None:
            v = v + self.added.unflatten(-1, (self.n_head, -1)).transpose(1, 2).to(v.dtype)
        y = super().attend(q, k, v, cache, start, bias)
        return y if self.gates is None else y * self.gates


@register("model", "ideas", IdeasConfig)
class Ideas(Modern):
    """The modern architecture with the changes of IdeasConfig. It samples without a cache."""

    def __init__(self, config: IdeasConfig, vocab_size: int, block_size: int) -> None:
        modern = ModernConfig(
            name=config.name,
            architecture="modern",
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
        )
        super().__init__(modern, vocab_size, block_size)
        self.ideas = config
        self.has_cache = self.has_graph_step = False
        C = config.n_embd
        for i, block in enumerate(self.blocks):
            block.attention = ChangedAttention(config.gates, block_spec(modern, block_size, i))
        if config.value_rows:
            self.values = NGramEmbedding(config.value_rows, C)
            shares = (nn.Parameter(torch.ones(C)) for _ in self.blocks)
            self.value_shares = nn.ParameterList(shares)
        if config.skips:
            early = range(config.n_layer // 2)
            self.skips = nn.ParameterList(nn.Parameter(torch.zeros(C)) for _ in early)
        self._init_weights()
        if config.ahead:
            self.ahead = nn.Linear(C, vocab_size, bias=False)
            nn.init.zeros_(self.ahead.weight)
        # Not in snapshots: a run with `mean_of` that resumes has lost the earlier weights.
        self.steps = 0
        self.earlier: deque[list[Tensor]] = deque(maxlen=max(config.mean_of - 1, 0))
        self.last: list[Tensor] | None = None  # the weights, while the mean is in their place

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    @torch.no_grad()
    def train(self, mode: bool = True) -> Ideas:
        """Put the mean of the weights in their place for an evaluation, and the weights back."""
        if self.ideas.mean_of and not mode and self.last is None:
            self.last = self._weights()
            for parameter, *values in zip(self.parameters(), *self.earlier, self.last, strict=True):
                parameter.copy_(torch.stack(values).mean(0))
        elif mode and self.last is not None:
            for parameter, value in zip(self.parameters(), self.last, strict=True):
                parameter.copy_(value)
            self.last = None
        return super().train(mode)

    def _hidden(self, tokens, cache=None, start=0):
        if self.ideas.value_rows:
            vectors = self.values(tokens, None, 0)
            for share, block in zip(self.value_shares, self.blocks, strict=True):
                block.attention.added = share * vectors
        if not self.ideas.skips:
            return super()._hidden(tokens)
        outputs: list[Tensor] = []
        hooks = []
        n = len(self.blocks)
        for i, block in enumerate(self.blocks):
            hooks.append(block.register_forward_hook(lambda _, __, y: outputs.append(y[0])))
            if i >= n - len(self.skips):
                hooks.append(block.register_forward_pre_hook(self._add_skip(outputs, n - 1 - i)))
        try:
            return super()._hidden(tokens)
        finally:
            for hook in hooks:
                hook.remove()

    def _add_skip(self, outputs: list[Tensor], early: int):
        """Return a hook that adds a share of the output of an early block to a block's input."""

        def add(block, inputs):
            x, *others = inputs
            return torch.addcmul(x, self.skips[early].to(x.dtype), outputs[early]), *others

        return add

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training and self.ideas.mean_of:  # one call for each step
            if self.steps and self.steps % MEAN_EVERY == 0:
                self.earlier.append(self._weights())
            self.steps += 1
        x = self._hidden(tokens)  # (B, T, C)
        if targets is None:
            return self.head(x)
        loss = cross_entropy(self.head(x), targets)
        if self.ideas.ahead and self.training:
            loss = loss + self.ideas.ahead * cross_entropy(self.ahead(x[:, :-1]), targets[:, 1:])
        return loss
