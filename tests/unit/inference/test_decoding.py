"""Preparing a model for sampling makes it faster and does not change its results."""

from __future__ import annotations

import pytest
import torch
from tasks import gpt_config
from torch import nn

from mingpt_ddp import torch_internals
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference import decoding
from mingpt_ddp.inference.decoding import FastLayerNorm, FastLinear, decoding_precision, prepare
from mingpt_ddp.models import GPT, build_model
from mingpt_ddp.models.ops import DTYPES
from mingpt_ddp.torch_internals import can_pack

torch.set_num_threads(1)

T, V = 12, 17
F32 = ("fp32", "fp32")
CONFIGS = {bias: gpt_config(bias=bias) for bias in (True, False)}


def randomized(bias: bool) -> GPT:
    """Return a model with random parameters. No bias is zero either."""
    torch.manual_seed(0)
    model = build_model(CONFIGS[bias], V, T)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05), ("fp16", 0.01)]
)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_the_logits_are_the_same(bias, precision, tolerance):
    """In 16 bits, they differ by no more than the rounding of that precision."""
    model, prepared = randomized(bias), randomized(bias)
    prepare(prepared, precision, batch=2)
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    cache = prepared.new_cache(2, next(prepared.parameters()).dtype)
    found = [prepared.decode(tokens[:, :5], cache, 0)]
    found += [prepared.decode(tokens[:, i : i + 1], cache, i) for i in range(5, T)]
    difference = (torch.stack(found, dim=1) - expected[:, 4:]).abs().max() / expected.std()
    assert float(difference) < tolerance
    assert (float(difference) > 1e-5) == (precision != "fp32")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_matrix_of_a_block_is_packed(precision):
    model = randomized(True)
    prepare(model, precision, batch=1)
    layers = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    if can_pack(DTYPES[precision]):
        assert layers == [FastLinear] * 2 * 4
    else:  # oneDNN supports bf16 only on CPUs with AVX-512
        assert precision == "bf16" and layers == [nn.Linear] * 2 * 4
        assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A subclass without changes, which other code may recognize by its type."""


class Shifted(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda _, inputs, y: y + 1)
    return layer


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
@pytest.mark.parametrize(
    ("make", "prepared"),
    [
        (lambda: nn.Linear(4, 4), FastLinear),
        (lambda: Named(4, 4), FastLinear),
        (lambda: Doubled(4, 4), Doubled),
        (lambda: hooked(nn.Linear(4, 4)), nn.Linear),
        (lambda: nn.LayerNorm(4), FastLayerNorm),
        (lambda: nn.LayerNorm(4, bias=False), FastLayerNorm),
        (lambda: Shifted(4), Shifted),
        (lambda: hooked(nn.LayerNorm(4)), nn.LayerNorm),
    ],
)
@torch.inference_mode()
def test_a_layer_with_its_own_forward_or_a_hook_is_not_replaced(make, prepared):
    model = nn.Sequential(make())
    nn.init.normal_(model[0].weight)
    x = torch.randn(3, 4)
    expected = model(x)
    prepare(model, "fp32", batch=1)
    torch.testing.assert_close(model(x), expected)
    assert type(model[0]) is prepared


class Uncached(nn.Module):
    """A user model that can only be called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, V)


def test_auto_keeps_a_model_without_a_cache_in_fp32():
    assert decoding_precision("auto", Uncached(), 1) == "fp32"
    assert decoding_precision("bf16", Uncached(), 1) == "bf16"
    assert decoding_precision("fp32", randomized(True), 1) == "fp32"


@pytest.mark.parametrize(
    ("bf16", "fbgemm", "few", "many"),
    [
        (True, True, "fp16", "bf16"),
        (True, False, "bf16", "bf16"),
        (False, True, "fp16", "fp16"),
        (False, False, *F32),
    ],
)
def test_auto_is_the_fastest_precision_of_the_cpu(bf16, fbgemm, few, many, monkeypatch):
    monkeypatch.setattr(torch_internals, "cpu_is_fast_at_bf16", lambda: bf16)
    monkeypatch.setattr(decoding, "can_pack", lambda dtype: fbgemm or dtype != torch.float16)
    assert decoding_precision("auto", randomized(True), 1) == few
    assert decoding_precision("auto", randomized(True), 10) == many
    if not fbgemm:
        with pytest.raises(ConfigError, match="precision=fp16 needs FBGEMM"):
            prepare(randomized(True), "fp16", 1)
