"""Sampling: the KV cache does not change the text, and only allowed tokens are drawn."""

from __future__ import annotations

import pytest
import torch
from tasks import gpt_config
from torch import Tensor, nn

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.data.tokenizers.tokenizer import CharTokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import END
from mingpt_ddp.inference.generate import (
    SamplingParams,
    exponential_race,
    first_arrival,
    generate,
    generate_text,
    sample_token,
)
from mingpt_ddp.models import GPT, build_model

torch.set_num_threads(1)  # more threads only slow down tensors this small

T, V = 12, 17
TOKENIZER = CharTokenizer("\nabcdefghijklmnop")


@pytest.fixture
def model() -> GPT:
    """Return a model with weights so large that every token of the window affects the next one."""
    model = build_model(gpt_config(dropout=0.2), V, T)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                scale = 0.3 if name.startswith("token") else 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def prompt(batch: int = 1, length: int = 3) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(length))


def drawn(model: GPT, tokens: Tensor, count: int, seed: int = 0, **settings) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        list(generate(model, tokens, count, SamplingParams(**settings), generator)), dim=1
    )


# number of tokens that stay when a full window of T tokens shifts
KEPT = 6
LENGTHS = [*range(1, T + 1), *[*range(KEPT, T + 1)] * 9]


@torch.no_grad()
def greedy_without_cache(model: GPT, tokens: Tensor, count: int) -> Tensor:
    """Generate each token by a call with the whole window, as `generate` documents it."""
    model.eval()
    lengths = LENGTHS[min(tokens.shape[1], T) - 1 :]
    for length in lengths[:count]:
        logits = model(tokens[:, -length:])[:, -1]
        tokens = torch.cat([tokens, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return tokens[:, -count:]


@pytest.mark.parametrize("length", [1, 3, T - 1, T, T + 1, 3 * T])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_sampling_is_the_same_with_and_without_a_cache(model, length, batch):
    """The text is longer than the context window, and the prompt may fill or exceed the window.
    There are one or several sequences.
    """
    tokens = prompt(batch, length)
    expected = greedy_without_cache(model, tokens, 2 * T)
    assert len(set(expected[0].tolist())) > 3, "the text is too uniform to show a difference"
    assert torch.equal(drawn(model, tokens, 2 * T, temperature=0), expected)


class Uncached(nn.Module):
    """A user model without a cache. It records the windows with which it is called."""

    def __init__(self, inner: GPT) -> None:
        super().__init__()
        self.inner, self.block_size = inner, inner.block_size
        self.windows: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.windows.append(tokens.clone())
        return self.inner(tokens)


@pytest.mark.parametrize("length", [1, 5, T, 2 * T])
def test_every_token_is_predicted_from_the_documented_window(model, length):
    tokens = prompt(2, length)
    watched = Uncached(model)
    new = drawn(watched, tokens, 2 * T)
    text = torch.cat([tokens, new], dim=1)
    lengths = LENGTHS[min(length, T) - 1 :]
    for i, window in enumerate(watched.windows):
        assert torch.equal(window, text[:, : length + i][:, -lengths[i] :]), i
    assert i == 2 * T - 1
    assert torch.equal(new, drawn(model, tokens, 2 * T)), "the text is another with a cache"


def test_a_window_is_prefilled_once(model):
    """All other calls decode a single token."""
    read = []
    decode = model.decode
    model.decode = lambda tokens, cache, start: (
        read.append(tokens.shape[1]) or decode(tokens, cache, start)
    )
    drawn(model, prompt(2), 2 * T)
    assert read == [3, *[1] * (T - 3), *[KEPT, *[1] * (T - KEPT)] * 2]


def test_a_class_attribute_named_block_size_does_not_hide_the_context(monkeypatch):
    class Cacheless(nn.Module):
        block_size = 1024

        def __init__(self, config, vocab_size, block_size):
            super().__init__()
            self.positions = nn.Embedding(block_size, vocab_size)

        def forward(self, tokens, targets=None):
            assert tokens.shape[1] <= 8
            return self.positions.weight[: tokens.shape[1]].expand(len(tokens), -1, -1)

    monkeypatch.setitem(BUILDERS["model"], "gpt", Cacheless)
    config = gpt_config(name="own", n_layer=1, n_head=1, n_embd=4)
    own = build_model(config, 5, 8)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    assert len(list(generate(own, tokens, 20, SamplingParams(temperature=0)))) == 20


def test_a_context_of_one_token():
    """The window always consists of the newest token."""
    small = build_model(gpt_config(n_layer=1, n_head=1, n_embd=4), V, 1)
    watched = Uncached(small)
    text = torch.cat([prompt(1, 1), drawn(watched, prompt(1, 1), 5)], dim=1)
    assert torch.equal(torch.cat(watched.windows, dim=1), text[:, :-1])
    assert torch.equal(drawn(small, prompt(1, 1), 5), drawn(watched, prompt(1, 1), 5))


def test_the_global_generator_is_not_used(model):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate_text(model, TOKENIZER, "abc", 20, SamplingParams(top_k=3, top_p=0.9), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_are_yielded_one_at_a_time(model):
    """The caller can print each token immediately, and stop at any time."""
    stream = generate(model, prompt(4), 1000, SamplingParams(temperature=0))
    assert [next(stream).shape for _ in range(3)] == [(4,)] * 3
    assert list(generate(model, prompt(), 0, SamplingParams())) == []


# The distribution of the drawn tokens

PROBABILITIES = torch.tensor([0.05, 0.4, 0.05, 0.3, 0.2])
DRAWS = 20_000


def frequencies(**settings) -> Tensor:
    """Return the relative frequency of each token."""
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    new = sample_token(logits, SamplingParams(**settings), torch.Generator().manual_seed(0))
    return torch.bincount(new, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0}, [1]),
        ({"temperature": 1e-38}, [1]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [1]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.85}, [1, 3, 4]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.45}, [1, 3]),  # 0.4 is not enough
        ({"top_p": 1e-6}, [1]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # these have 0.7 / 0.9 of the three that top_k leaves
        ({"top_k": 2, "top_p": 0.95}, [1, 3]),
    ],
    ids=str,
)
def test_only_allowed_tokens_are_drawn_in_proportion(settings, kept):
    expected = torch.zeros(5)
    temperature = max(settings.get("temperature", 1), 1e-3)
    expected[kept] = (PROBABILITIES[kept].log() / temperature).softmax(dim=0)
    found = frequencies(**settings)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


def test_an_exponential_race_draws_by_the_probabilities():
    """Pearson's chi-square with 4 degrees of freedom exceeds 18.5 with a probability of 0.001."""
    generator = torch.Generator().manual_seed(0)
    indices = exponential_race(PROBABILITIES.repeat(DRAWS, 1), generator)
    found = torch.bincount(indices, minlength=5)
    expected = PROBABILITIES * DRAWS
    assert float(((found - expected) ** 2 / expected).sum()) < 18.5


TINY = 1.4e-45  # the smallest positive number in fp32


@pytest.mark.parametrize("others", [0.0, TINY, 1.0, torch.inf])
@pytest.mark.parametrize("own", [0.0, TINY, 1.0, torch.inf])
def test_a_token_of_probability_zero_is_never_drawn(own, others):
    """This holds for all arrival times, although 0 / 0 is not a number."""
    probabilities = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, TINY]])
    times = torch.tensor([[others, own, others], [others, others, own]])
    assert first_arrival(probabilities, times).tolist() == [1, 2]


def test_a_model_without_finite_logits_is_refused(model):
    """torch.multinomial would not detect it."""
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        with pytest.raises(RuntimeError, match="the logits of the model are not finite"):
            drawn(model, prompt(), 1, temperature=0)


def test_each_row_has_its_own_limits():
    rows = torch.stack(
        [PROBABILITIES, PROBABILITIES.flip(0), torch.tensor([0.96, 0.01, 0.01, 0.01, 0.01])]
    ).log()
    allowed = [{1, 3}, {3, 1}, {0}]
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        new = sample_token(rows, SamplingParams(top_p=0.5), generator).tolist()
        assert all(character in row for character, row in zip(new, allowed, strict=True))


# The model is restored afterwards


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(model, training):
    model.train(training)
    list(generate(model, prompt(), 3, SamplingParams()))
    assert model.training is training
    stream = generate(model, prompt(), 100, SamplingParams())
    next(stream)
    assert not model.training  # no dropout while text is generated
    stream.close()
    assert model.training is training


@pytest.mark.parametrize(
    "tokens", [torch.full((1, 3), V), torch.zeros(1, 0, dtype=torch.int64)], ids=["V", "empty"]
)
def test_the_mode_is_restored_after_an_error(model, tokens):
    model.train()
    with pytest.raises(IndexError):
        list(generate(model, tokens, 3, SamplingParams()))
    assert model.training


def test_training_continues_after_sampling(model):
    """No tensor created in inference mode remains in the model."""
    model.train()
    list(generate(model, prompt(), T + 3, SamplingParams()))
    model(prompt(2, 5), prompt(2, 5)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Generated text


def test_text_does_not_include_the_prompt(model):
    """An empty prompt stands for the start of a line."""
    greedy = SamplingParams(temperature=0)
    for begin, tokens in (("abc", [[1, 2, 3]]), ("", [[0]])):
        (text,) = generate_text(model, TOKENIZER, begin, 30, greedy, seed=0)
        expected = greedy_without_cache(model, torch.tensor(tokens), 30)
        assert text == TOKENIZER.decode(expected[0].tolist())
    assert generate_text(model, TOKENIZER, "abc", 0, greedy, seed=0) == [""]


def test_several_samples_differ_and_repeat(model):
    first, again = (
        generate_text(model, TOKENIZER, "abc", 30, SamplingParams(), seed=0, n_samples=4)
        for _ in range(2)
    )
    assert len(set(first)) == 4
    assert all(len(text) == 30 for text in first)
    assert again == first


# Models with an end token for documents


def test_rows_end_where_their_documents_end(model):
    """Other rows are not affected. Generation stops when the last document has ended."""
    tokens = prompt(4)
    whole = drawn(model, tokens, 60, seed=1)
    end = int(whole[0, 5])
    generator = torch.Generator().manual_seed(1)
    found = torch.stack([*generate(model, tokens, 60, SamplingParams(), generator, end)], dim=1)
    lengths = []
    for row, expected in zip(found.tolist(), whole.tolist(), strict=True):
        length = expected.index(end) + 1 if end in expected else 60
        assert row[:length] == expected[:length]
        assert {*row[length:]} <= {end}
        lengths.append(length)
    assert len(found[0]) == max(lengths) > min(lengths)


def test_the_text_does_not_contain_the_end_token(model):
    plain = CharTokenizer(TOKENIZER.vocabulary[:-1] + "\u2603")
    ended = CharTokenizer(TOKENIZER.vocabulary[:-1] + END)
    settings = {"max_new_tokens": 60, "sampling": SamplingParams(), "seed": 3, "n_samples": 4}
    for begin, same in (("ab", "ab"), ("", "\u2603")):  # an empty prompt begins a document
        whole = generate_text(model, plain, same, **settings)
        assert any("\u2603" in text for text in whole)
        found = generate_text(model, ended, begin, **settings)
        assert found == [text.partition("\u2603")[0] for text in whole]
