"""Sampling: the next character from the scores, the scores from a KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mingpt_ddp.corpus import Vocabulary
from mingpt_ddp.model import GPT


@torch.inference_mode()
def generate(
    model: GPT,
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
        tokens: (B, T) the prompt, T >= 1; what exceeds the context is cut off at its start.
        temperature: divides the scores; 0 takes the likeliest character.
        top_k: only the k likeliest characters.
        top_p: only the likeliest characters that together have this probability (Holtzman et al. 2020,
            arXiv:1904.09751).
        generator: where the random numbers come from.
    """
    was_training = model.training
    model.eval()
    window = tokens[:, -model.block_size :]
    try:
        cache = model.new_cache(len(tokens), model.token_embedding.weight.dtype)
        logits = model.decode(window, cache, 0)
        for _ in range(max_new_tokens):
            new = choose(logits, temperature, top_k, top_p, generator)
            yield new
            start = window.shape[1]
            window = torch.cat([window, new[:, None]], dim=1)[:, -model.block_size :]
            if start < model.block_size:
                logits = model.decode(new[:, None], cache, start)
            else:
                logits = model.decode(window, cache, 0)
    finally:
        model.train(was_training)


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
    model: GPT,
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
    device = model.token_embedding.weight.device
    start = vocabulary.encode(prompt) or [vocabulary.index.get("\n", 0)]
    tokens = torch.tensor(start, device=device).expand(n_samples, -1)
    generator = torch.Generator(device).manual_seed(seed)
    steps = list(generate(model, tokens, max_new_tokens, temperature, top_k, top_p, generator))
    columns = torch.stack(steps, dim=1) if steps else tokens[:, :0]
    return [vocabulary.decode(row) for row in columns.tolist()]
