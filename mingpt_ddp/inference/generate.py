"""Generate text: compute logits with a KV cache, and sample the next token from them."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer
from mingpt_ddp.inference.decoding import CUDAGraphDecodeStep
from mingpt_ddp.models import eval_mode, has_cache, has_graph_step

# On a GPU, check whether all rows have ended only once in this many tokens, because the host has to
# wait for the answer.
END_CHECK_INTERVAL = 16
# Lower temperatures would underflow in fp32. They are not needed: sampling already takes the most
# likely token at much higher temperatures.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """Settings that decide how the next token is sampled from the logits.

    Source of top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"
    (arXiv:1904.09751).
    """

    temperature: float = 1.0  # divides the logits; 0 always takes the most likely token
    top_k: int | None = None  # sample only from the k most likely tokens
    # Sample only from the most likely tokens whose probabilities sum to top_p.
    top_p: float | None = None


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    sampling: SamplingParams,
    rng: torch.Generator | None = None,
    end: int | None = None,
) -> Iterator[Tensor]:
    """Yield the new tokens of all rows (B,), one position at a time.

    Each token is predicted from a window of the text. The window starts as the prompt and grows by
    each new token until it fills the context of block_size tokens, then shrinks to its newer half
    and grows again. A KV cache is therefore recomputed only after each shift, and no token is read
    more than twice. (A window that slides by one token would change all positions and recompute the
    cache for every token.)

    Args:
        model: A model from `build_model`. The windows, and therefore the text, are the same with a
            KV cache (`SupportsKVCache`) as without.
        tokens: The prompt, (B, T) with T >= 1. Its last block_size tokens are used.
        rng: Source of the random numbers. None for the global generator.
        end: Token that ends a document. Once a row has this token, all its later tokens are the
            same token. Generation stops soon after all rows have ended. None if there is no such
            token.

    Raises:
        RuntimeError: The logits of the first token are not finite.
    """
    block_size = cast(int, vars(model).get("block_size"))  # set by build_model
    window = tokens[:, -block_size:]
    prefill = True
    with eval_mode(model):
        positions = min(block_size, tokens.shape[1] + max_new_tokens)
        session = DecodeSession(model, len(tokens), positions)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        check_every = END_CHECK_INTERVAL if tokens.is_cuda else 1
        for index in range(max_new_tokens):
            logits = session.logits(window, prefill)
            if index == 0:  # only once, because each check waits for the GPU
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
                n_kept = max(1, block_size // 2)  # number of tokens to keep, including the new one
                window = window[:, block_size + 1 - n_kept :]
            window = torch.cat([window, new[:, None]], dim=1)


class DecodeSession:
    """Computes the logits after a growing window of text.

    It uses a KV cache and a CUDA graph if the model supports them.
    """

    def __init__(self, model: nn.Module, batch: int, positions: int) -> None:
        """
        Args:
            positions: Number of positions in the KV cache. No window may be longer.
        """
        self.model = model
        self.graph = None
        self.cached_model = model if has_cache(model) else None
        if self.cached_model is None:
            return
        weight = next(model.parameters())
        # Allocate only the positions that are needed. The block_size of an untrusted snapshot could
        # be any number, and the cache would then be as large.
        shortened: Any = copy.copy(model)
        vars(shortened).update(block_size=positions)
        self.cache = shortened.new_cache(batch, weight.dtype)
        if not has_graph_step(model) or not weight.is_cuda:
            return
        # Deterministic algorithms read indices on the host, which a CUDA graph cannot.
        if not torch.are_deterministic_algorithms_enabled():
            self.graph = CUDAGraphDecodeStep(model, self.cache, batch, weight.device)

    def logits(self, window: Tensor, prefill: bool) -> Tensor:
        """Return the logits (B, V) after a window (B, T). The next call may overwrite them.

        Args:
            prefill: True to compute the cache from scratch. False if the window is the previous
                window plus one token.
        """
        if self.cached_model is None:
            return self.model(window)[:, -1]
        if prefill:
            return self.cached_model.decode(window, self.cache, 0)
        position = window.shape[1] - 1
        if self.graph:
            return self.graph(window[:, -1], position)
        return self.cached_model.decode(window[:, -1:], self.cache, position)


def check_logits(logits: Tensor) -> None:
    """Check that each row of the logits (B, V) has a finite maximum.

    Raises:
        RuntimeError: The maximum of a row is not finite, for instance because a weight is not.
    """
    if not logits.amax(dim=-1).isfinite().all():
        raise RuntimeError(
            "the logits of the model are not finite; use a snapshot from before the training "
            "diverged"
        )


def sample_token(
    logits: Tensor, sampling: SamplingParams, rng: torch.Generator | None = None
) -> Tensor:
    """Sample one token for each row of the logits (B, V). Return the tokens (B,)."""
    top_k = sampling.top_k
    top_p = sampling.top_p
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    # No logit is above 0 after this, so that the division cannot overflow.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits = logits / max(sampling.temperature, MIN_TEMPERATURE)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ranked, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        likelier = ranked.cumsum(dim=-1) - ranked  # total probability of the likelier tokens
        excluded = likelier >= top_p
        # `excluded` is in the order of probability. Put it into the order of token ids.
        excluded = excluded.scatter(-1, order, excluded)
        logits = logits.masked_fill(excluded, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if probabilities.is_cuda:  # torch.multinomial would wait twice for the GPU
        return exponential_race(probabilities, rng)
    return torch.multinomial(probabilities, 1, generator=rng)[:, 0]


def exponential_race(probabilities: Tensor, rng: torch.Generator | None) -> Tensor:
    """Draw an index for each row of probabilities (B, V) without waiting for the device.

    If independent events have the rates p, event i comes first with probability p[i]. This is the
    Gumbel-max trick without logarithms, as in https://github.com/meta-pytorch/gpt-fast.

    Returns:
        The drawn indices, (B,).
    """
    return first_arrival(probabilities, torch.empty_like(probabilities).exponential_(generator=rng))


def first_arrival(probabilities: Tensor, times: Tensor) -> Tensor:
    """Return the index (B,) of the first event in each row. Event i comes at times[i] / p[i].

    Args:
        probabilities: The probabilities p, (B, V). Events of probability 0 never happen.
        times: Independent exponential numbers of rate 1, (B, V).
    """
    inverse_times = probabilities / times
    # An impossible event could win with NaN (0 / 0), or tie with a possible one at 1 / inf = 0.
    return inverse_times.masked_fill(probabilities == 0, -1).argmax(dim=-1)


def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: SamplingParams,
    seed: int,
    n_samples: int = 1,
) -> list[str]:
    """Generate continuations of a prompt. Return them without the prompt.

    A continuation stops at the end of a document. An empty prompt stands for the end of an earlier
    document, or for a line feed if the tokenizer has no token for the end of a document.

    Raises:
        DataError: The prompt has characters that the tokenizer does not know.
    """
    device = next(model.parameters()).device
    end = tokenizer.end
    start = tokenizer.encode(prompt) or [tokenizer.line_feed if end is None else end]
    tokens = torch.tensor(start, device=device).expand(n_samples, -1)
    rng = torch.Generator(device).manual_seed(seed)
    steps = list(generate(model, tokens, max_new_tokens, sampling, rng, end))
    columns = torch.stack(steps, dim=1) if steps else tokens[:, :0]
    return [tokenizer.decode(row) for row in columns.tolist()]
