"""Sampling: the next character from the scores, the scores from a KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mingpt_ddp.data.dataset import CharTokenizer
from mingpt_ddp.inference.decoding import CUDAGraphDecodeStep
from mingpt_ddp.models import SupportsCUDAGraphDecode, SupportsKVCache

MIN_TEMPERATURE = (
    1e-30  # temperature; below it fp32 has too few digits, and all but the likeliest is impossible long before
)


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

    A character is chosen after a window of the text. The first window is the prompt, and each next one is longer by the
    character that was chosen, until it fills the context, block_size characters. The window behind a full one has the
    newest `context_after_shift(block_size)` characters, half of the context, and grows again. So every character of a long text is
    chosen after at least so many, and a model with a cache reads a whole window only where it begins anew: no character
    is read more than twice. (A window that moved by one character a time would have to be read for each, for all that
    is in it would move to another position.)

    Args:
        model: a `LanguageModel`, as `build_model` makes it, and a `SupportsKVCache` if it has a cache; without one the windows
            are the same, and so is the text.
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
    text = tokens.new_empty(len(tokens), block_size)  # (B, block_size), of which the first `length` are the window
    length = min(tokens.shape[1], block_size)
    text[:, :length] = tokens[:, -block_size:]
    try:
        reader = DecodeSession(model, len(tokens))
        fresh = True
        for _ in range(max_new_tokens):
            new = sample_token(reader.scores(text[:, :length], fresh), temperature, top_k, top_p, generator)
            yield new
            fresh = length == block_size
            if fresh:
                length = context_after_shift(block_size)
                text[:, : length - 1] = text[:, block_size - length + 1 :].clone()
            else:
                length += 1
            text[:, length - 1] = new
    finally:
        model.train(was_training)


def context_after_shift(block_size: int) -> int:
    """How many characters the window behind a full one has, the newest among them."""
    return max(1, block_size // 2)


class DecodeSession:
    """The scores behind a window, by a cache where the model has one."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model, self.recorded = model, None
        if isinstance(model, SupportsKVCache):
            weight = next(model.parameters())
            self.cache = model.new_cache(batch, weight.dtype)
            if weight.is_cuda and isinstance(model, SupportsCUDAGraphDecode):
                self.recorded = CUDAGraphDecodeStep(model, self.cache, batch, weight.device)

    def scores(self, window: Tensor, fresh: bool) -> Tensor:
        """Logits (B, V) behind a window (B, T), valid until the next call.

        Args:
            fresh: it has another beginning than that before; otherwise it has one more character.
        """
        position = window.shape[1] - 1
        if not isinstance(self.model, SupportsKVCache):
            logits: Tensor = self.model(window)[:, -1]
            return logits
        if fresh:
            return self.model.decode(window, self.cache, 0)
        if self.recorded:
            return self.recorded(window[:, -1], position)
        return self.model.decode(window[:, -1:], self.cache, position)


def sample_token(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One character per row of the logits (B, V), as indices (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, MIN_TEMPERATURE)  # at most 0: no overflow
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
    vocabulary: CharTokenizer,
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
