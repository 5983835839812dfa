"""Sampling: the next character from the scores, the scores from a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.corpus import Vocabulary
from mingpt_ddp.model import Decoder


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the new characters one position at a time, each (B,).

    The cache serves until the context is full. From then on the window slides by one character a step, which gives
    every learned position another character, so that each step reads the whole window anew, as without a cache.

    Args:
        model: a `LanguageModel`, as `build_model` makes it, and a `Decoder` if it has a cache.
        tokens: (B, T) the prompt, T >= 1; what exceeds the context is cut off at its start.
        temperature: divides the scores; 0 takes the likeliest character.
        top_k: only the k likeliest characters.
        top_p: only the likeliest characters that together have this probability (Holtzman et al. 2020,
            arXiv:1904.09751).
        generator: where the random numbers come from.
    """
    was_training = model.training
    model.eval()
    block_size: int = vars(model)["block_size"]
    window = tokens[:, -block_size:]
    cache = None
    try:
        if isinstance(model, Decoder):
            cache = model.new_cache(len(tokens), next(model.parameters()).dtype)
        logits = _last(model, window, cache, 0)
        for _ in range(max_new_tokens):
            new = choose(logits, temperature, top_k, top_p, generator)
            yield new
            start = window.shape[1]
            window = torch.cat([window, new[:, None]], dim=1)[:, -block_size:]
            if start < block_size and cache is not None:
                logits = _last(model, new[:, None], cache, start)
            else:
                logits = _last(model, window, cache, 0)
    finally:
        model.train(was_training)


def _last(model: nn.Module, tokens: Tensor, cache: Any, start: int) -> Tensor:
    """Logits (B, V) behind the last of the tokens (B, T)."""
    if cache is None:
        logits: Tensor = model(tokens)[:, -1]
        return logits
    assert isinstance(model, Decoder)
    return model.decode(tokens, cache, start)


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One character per row of the logits (B, V), as indices (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.double()
    logits = ((logits - logits.max(dim=-1, keepdim=True).values) / temperature).float()  # at most 0: no overflow
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ranked, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        unneeded = ranked.cumsum(dim=-1) - ranked >= top_p  # what stands before already reaches top_p
        logits = logits.masked_fill(unneeded.scatter(-1, order, unneeded), -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def generate_text(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    n_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[str]:
    """Continuations of a prompt (without it); an empty prompt starts as after a line's end.

    Raises:
        DataError: the prompt has characters outside the vocabulary.
    """
    device = next(model.parameters()).device
    start = vocabulary.encode(prompt) or [vocabulary.index.get("\n", 0)]
    tokens = torch.tensor(start, device=device).expand(n_samples, -1)
    generator = torch.Generator(device).manual_seed(seed)
    steps = list(generate(model, tokens, max_new_tokens, temperature, top_k, top_p, generator))
    columns = torch.stack(steps, dim=1) if steps else tokens[:, :0]
    return [vocabulary.decode(row) for row in columns.tolist()]
