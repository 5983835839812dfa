"""Generate text: logits from a KV cache, the next token sampled from the logits."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer
from mingpt_ddp.inference.decoding import CUDAGraphDecodeStep
from mingpt_ddp.models import eval_mode, has_cache, has_graph_step

CHECK_TOKENS = 16  # on a GPU, where looking whether all rows have ended waits for it
MIN_TEMPERATURE = 1e-30  # lower ones underflow in fp32; sampling is greedy long before


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from its logits."""

    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_k: int | None = None  # sample from the k likeliest tokens
    top_p: float | None = None  # from the likeliest that sum to it (Holtzman 2020, 1904.09751)


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    sampling: SamplingParams,
    rng: torch.Generator | None = None,
    end: int | None = None,
) -> Iterator[Tensor]:
    """Yield the new tokens one position at a time, each (B,).

    Each token is predicted from a window of the text. The window starts as the prompt and grows by
    each new token until it fills the context of block_size tokens, then shrinks to its newer half
    and grows again. A KV cache is therefore recomputed only after each shift, and no token is read
    more than twice. (A window that slides by one token would change all positions and recompute the
    cache for every token.)

    Args:
        model: a model from `build_model`. The windows, and so the text, are the same with
            a KV cache (`SupportsKVCache`) and without.
        tokens: (B, T) the prompt, T >= 1; its last block_size tokens are used.
        rng: source of the random numbers; None is the global generator.
        end: the token that ends a document: a row has no others after its first one. Generation
            stops soon after all rows have ended; None: there is none.

    Raises:
        RuntimeError: the logits of the first token are not finite.
    """
    block_size = cast(int, vars(model).get("block_size"))  # of the instance, see build_model
    window = tokens[:, -block_size:]
    prefill = True
    with eval_mode(model):
        positions = min(block_size, tokens.shape[1] + max_new_tokens)
        session = DecodeSession(model, len(tokens), positions)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        check_every = CHECK_TOKENS if tokens.is_cuda else 1
        for index in range(max_new_tokens):
            logits = session.logits(window, prefill)
            if index == 0:  # checking every token would wait for a GPU each time
                check_logits(logits)
            new = sample_token(logits, sampling, rng)
            if end is not None:
                new = new.masked_fill(ended, end)
                ended |= new == end
            yield new
            if end is not None and index % check_every == 0 and ended.all():
                return
            prefill = window.shape[1] == block_size
            if prefill:
                kept = max(1, block_size // 2)  # tokens, the new one included
                window = window[:, block_size + 1 - kept :]
            window = torch.cat([window, new[:, None]], dim=1)


class DecodeSession:
    """Logits after a growing window, with a KV cache and a CUDA graph if the model has them."""

    def __init__(self, model: nn.Module, batch: int, positions: int) -> None:
        """
        Args:
            positions: what the KV cache holds, for a window that never grows longer.
        """
        self.model = model
        self.graph = None
        self.cached = model if has_cache(model) else None
        if self.cached is None:
            return
        weight = next(model.parameters())
        sized: Any = copy.copy(model)
        # that of an untrusted snapshot may be any number
        vars(sized).update(block_size=positions)
        self.cache = sized.new_cache(batch, weight.dtype)
        if not has_graph_step(model) or not weight.is_cuda:
            return
        # Deterministic algorithms read indices on the host, which a CUDA graph cannot.
        if not torch.are_deterministic_algorithms_enabled():
            self.graph = CUDAGraphDecodeStep(model, self.cache, batch, weight.device)

    def logits(self, window: Tensor, prefill: bool) -> Tensor:
        """Return the logits (B, V) after a window (B, T), valid until the next call.

        Args:
            prefill: compute the cache from scratch; otherwise the window is the previous one plus
                one token.
        """
        if self.cached is None:
            return self.model(window)[:, -1]
        if prefill:
            return self.cached.decode(window, self.cache, 0)
        position = window.shape[1] - 1
        if self.graph:
            return self.graph(window[:, -1], position)
        return self.cached.decode(window[:, -1:], self.cache, position)


def check_logits(logits: Tensor) -> None:
    """Check that logits (B, V) have a largest one in each row.

    Raises:
        RuntimeError: some row has none, because a weight is not finite, say.
    """
    if not logits.amax(dim=-1).isfinite().all():
        raise RuntimeError("its logits are not finite")


def sample_token(
    logits: Tensor, sampling: SamplingParams, rng: torch.Generator | None = None
) -> Tensor:
    """Sample one token per row of the logits (B, V); returns (B,)."""
    top_k = sampling.top_k
    top_p = sampling.top_p
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    logits = logits - logits.amax(dim=-1, keepdim=True)  # at most 0: the division cannot overflow
    logits = logits / max(sampling.temperature, MIN_TEMPERATURE)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ranked, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        likelier = ranked.cumsum(dim=-1) - ranked  # probability of the tokens before each
        excluded = likelier >= top_p
        excluded = excluded.scatter(-1, order, excluded)  # by token again
        logits = logits.masked_fill(excluded, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if probabilities.is_cuda:  # where multinomial waits for the device, twice
        return exponential_race(probabilities, rng)
    return torch.multinomial(probabilities, 1, generator=rng)[:, 0]


def exponential_race(probabilities: Tensor, rng: torch.Generator | None) -> Tensor:
    """Draw an index per row of probabilities (B, V) without waiting for the device; (B,).

    Of independent events with rates p, event i is the first with probability p[i]: the Gumbel-max
    trick without logarithms, as in https://github.com/meta-pytorch/gpt-fast.
    """
    return first_arrival(probabilities, torch.empty_like(probabilities).exponential_(generator=rng))


def first_arrival(probabilities: Tensor, times: Tensor) -> Tensor:
    """Return which event is the first in each row, (B,); event i is at times[i] / p[i].

    Args:
        probabilities: (B, V); events of probability 0 never happen.
        times: (B, V), independent, exponential of rate 1.
    """
    rates = probabilities / times
    # 0 / 0 is not a number, and 1 / inf is 0, too
    return rates.masked_fill(probabilities == 0, -1).argmax(dim=-1)


def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: SamplingParams,
    seed: int,
    n_samples: int = 1,
) -> list[str]:
    """Return continuations of a prompt, without the prompt, each up to the end of a document.

    An empty prompt counts as the end of the document before, or as a line feed if there is none.

    Raises:
        DataError: the prompt has characters that the tokenizer does not know.
    """
    device = next(model.parameters()).device
    end = tokenizer.end
    start = tokenizer.encode(prompt) or [tokenizer.line_feed if end is None else end]
    tokens = torch.tensor(start, device=device).expand(n_samples, -1)
    rng = torch.Generator(device).manual_seed(seed)
    steps = list(generate(model, tokens, max_new_tokens, sampling, rng, end))
    columns = torch.stack(steps, dim=1) if steps else tokens[:, :0]
    return [tokenizer.decode(row) for row in columns.tolist()]
