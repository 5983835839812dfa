"""The parts of the modern decoder agree with explicit formulas. Its initialization is checked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mingpt_ddp.config.keys.model_config import ModernConfig
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import Modern, build_model
from mingpt_ddp.models.ngrams import NGramEmbedding
from mingpt_ddp.models.ops import (
    causal_attention,
    norm_and_rotate,
    norm_and_shift,
    relu_squared,
    rms_norm,
)
from mingpt_ddp.models.rotary import rotary_table

CONFIG = ModernConfig(
    name="test", architecture="modern", n_layer=2, n_head=2, n_embd=16, dropout=0.0
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_rms_norm_of_zeros_is_zero():
    x = torch.zeros(2, 4, requires_grad=True)
    y = rms_norm(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert torch.isfinite(x.grad).all()


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(dim=-1, keepdim=True).sqrt()


def assert_same_gradients(function, formula, *inputs: torch.Tensor) -> None:
    """Compare results and gradients. The result without recording gradients must be the same."""
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    given = [tensor.requires_grad_() for tensor in inputs]
    expected = formula(*exact)
    y = function(*given)
    weights = random(*y.shape, seed=9)
    (expected * weights).sum().backward()
    (y * weights.to(y.dtype)).sum().backward()
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(function(*given), y, atol=1e-6, rtol=1e-6)


def shifted(x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    y = normalized(x)
    return y + share * torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)


def rotated(qkv: torch.Tensor) -> torch.Tensor:
    y = normalized(qkv[:, :, :2])
    cos, sin = TABLE.double().unbind(1)
    return y * cos + torch.cat([y[..., 4:], y[..., :4]], dim=-1) * sin


TABLE = rotary_table(7, 8, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("function", "formula", "shapes"),
    [
        (rms_norm, normalized, [(3, 5, 8)]),
        (relu_squared, lambda x: x.clamp(min=0) ** 2, [(4, 7)]),
        *((norm_and_shift, shifted, [(3, T, 8), (8,)]) for T in (1, 2, 7)),
        # a view that is not contiguous
        (lambda qkv: norm_and_rotate(qkv[:, :, :2], TABLE), rotated, [(2, 7, 3, 3, 8)]),
    ],
)
def test_results_and_gradients_agree_with_the_formula(function, formula, shapes):
    inputs = [random(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    assert_same_gradients(function, formula, *inputs)


@pytest.mark.parametrize("function", [rms_norm, relu_squared])
def test_16_bits_stay_16_bits_on_a_gpu(function):
    """CUDA's autocast rules run some operations in fp32. No GPU is needed to check the dtype."""
    x = FakeTensor(
        FakeTensorMode(),
        torch.empty(2, 8, dtype=torch.bfloat16, device="meta"),
        torch.device("cuda", 0),
    )
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast does nothing without a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert function(x).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("T", "S"), [(1, 1), (1, 9), (64, 64), (65, 65), (150, 150), (5, 140), (130, 200)]
)
def test_attention_is_causal(T, S, dtype):
    """Output and gradients agree with the formula. In bf16, attention is computed in blocks."""
    q, k, v = (
        random(2, 3, n, 8, seed=i, dtype=torch.float32).to(dtype) for i, n in enumerate((T, S, S))
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    scores = exact[0] @ exact[1].mT / math.sqrt(8)
    seen = torch.ones(T, S, dtype=torch.bool).tril(diagonal=S - T)
    expected = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ exact[2]
    expected.sum().backward()
    given = [tensor.requires_grad_() for tensor in (q, k, v)]
    y = causal_attention(*given)
    y.sum().backward()
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.06}
    torch.testing.assert_close(y.double(), expected, **close)
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_dropout_preserves_the_mean(dtype):
    q, k = torch.zeros(2, 1, 1, 100, 8, dtype=dtype)  # uniform attention
    v = torch.ones(1, 1, 100, 8, dtype=dtype)
    torch.manual_seed(0)
    last = torch.stack(
        [causal_attention(q, k, v, dropout=0.5)[0, 0, -1, 0] for _ in range(200)]
    ).float()
    assert float(last.std()) == pytest.approx(0.1, abs=0.03)
    assert float(last.mean()) == pytest.approx(1.0, abs=0.03)


def test_rotary_embedding_preserves_norms_and_scores_depend_on_distances():
    T, D = 12, 8
    table = rotary_table(T, D, torch.device("cpu"), torch.float32)
    # The vectors are the same at all positions.
    x = rms_norm(random(1, 1, 2, 1, D, dtype=torch.float32)).expand(1, T, 2, 1, D)
    rotated = norm_and_rotate(x, table)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotated[:, 0], x[:, 0], atol=1e-5, rtol=1e-5)
    q, k = rotated[0, :, 0, 0], rotated[0, :, 1, 0]  # (T, D)
    scores = q @ k.T
    for distance in range(-T + 1, T):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    assert float(scores[0].std()) > 0.01, "the position has no effect"


@pytest.mark.parametrize("rows", [0, 64])
def test_initial_logits_are_uniform(rows):
    torch.manual_seed(0)
    model = build_model(replace(CONFIG, ngram_rows=rows), 31, 16)
    x, y = torch.randint(31, (2, 4, 16))
    assert model(x, y).item() == pytest.approx(math.log(31), abs=1e-6)


def test_every_block_is_initially_the_identity():
    torch.manual_seed(0)
    model = build_model(CONFIG, 31, 16)
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output[0]]))
    model(torch.randint(31, (2, 16)))
    assert all(torch.equal(seen[0], other) for other in seen)


@pytest.mark.parametrize("rows", [0, 5])
def test_all_parameters_get_gradients(rows):
    """Once steps have changed the parameters that start at zero, every parameter has a gradient."""
    torch.manual_seed(0)
    model = build_model(replace(CONFIG, ngram_rows=rows), 31, 16)
    x, y = torch.randint(31, (2, 4, 16))
    for _ in range(4):
        model.zero_grad()
        model(x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
    for name, parameter in model.named_parameters():
        assert float(parameter.grad.abs().max()) > 0, name


def test_ngram_embeddings_by_hand():
    """Each token adds four vectors of size C / 4, for its last 2, 3, 4 and 5 tokens."""
    ngrams = NGramEmbedding(1000, 16)
    text = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(0))
    found = ngrams(text, None, 0).unflatten(2, (4, 4))
    for row, sequence in enumerate(text.tolist()):
        ids = [0] * 4 + [token + 1 for token in sequence]
        for t in range(9):
            for i, n in enumerate((2, 3, 4, 5)):
                hashed = 0
                for id_ in reversed(ids[t + 5 - n : t + 5]):
                    hashed = (hashed * 1_103_515_245 + id_) % (2**31 - 1)
                assert torch.equal(found[row, t, i], ngrams.table.weight[hashed % 1000])


def test_a_head_of_odd_width_is_refused():
    with pytest.raises(ConfigError, match=r"model.n_embd=15 divided by model.n_head=3 must be"):
        ModernConfig(
            name="test", architecture="modern", n_layer=1, n_head=3, n_embd=15, dropout=0.0
        )
    with pytest.raises(ConfigError, match=r"model.n_embd=18 must be divisible by 4"):
        replace(CONFIG, n_head=1, n_embd=18, ngram_rows=64)


def test_flops_by_hand():
    """There are six FLOPs for each parameter of a matrix, plus the products of attention."""
    model = Modern(CONFIG, 31, 16)
    matrices = (
        sum(p.numel() for p in model.parameters() if p.dim() >= 2)
        - model.token_embedding.weight.numel()
    )
    assert model.flops_per_token() == 6 * matrices + 12 * 2 * 16 * 16
    assert isinstance(model.head, nn.Linear)
