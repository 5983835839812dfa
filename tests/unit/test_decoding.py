"""What is made ready for sampling computes what it computed before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mingpt_ddp.decoding import PackedLinear, choose_device, choose_precision, prepare
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.generate import generate
from mingpt_ddp.groups import GPTConfig
from mingpt_ddp.model import GPT, build_model

torch.set_num_threads(1)

T, V = 12, 17
CONFIGS = {bias: GPTConfig("test", "gpt", 2, 2, 16, 0.0, bias, "gelu") for bias in (True, False)}


def drawn(bias: bool) -> GPT:
    """Weights that differ from zero everywhere, biases too."""
    torch.manual_seed(0)
    model = build_model(CONFIGS[bias], V, T)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_the_scores_are_the_same(bias, precision, tolerance):
    """In bf16 they differ, but by no more than its digits."""
    model, prepared = drawn(bias), drawn(bias)
    prepare(prepared, precision, batch=2)
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    cache = prepared.new_cache(2, torch.float32)
    found = [prepared.decode(tokens[:, :5], cache, 0)]
    found += [prepared.decode(tokens[:, i : i + 1], cache, i) for i in range(5, T)]
    difference = (torch.stack(found, dim=1) - expected[:, 4:]).abs().max() / expected.std()
    assert float(difference) < tolerance
    assert (float(difference) > 1e-4) == (precision == "bf16")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_every_matrix_of_a_block_is_packed():
    model = drawn(True)
    prepare(model, "bf16", batch=1)
    layers = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert layers == [PackedLinear] * 2 * 4


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """What another part of a program tells by its type."""


def test_a_layer_that_computes_something_else_stays_as_it_is():
    model = nn.Sequential(Doubled(4, 4), Named(4, 4))
    x = torch.arange(4.0)
    expected = model(x)
    prepare(model, "fp32", batch=1)
    assert type(model[0]) is Doubled
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)


def test_greedy_text_of_packed_matrices_is_the_same():
    model, prepared = drawn(True), drawn(True)
    prepare(prepared, "fp32", batch=3)
    tokens = torch.arange(6).view(3, 2)
    texts = [torch.stack(list(generate(m, tokens, 3 * T, temperature=0))) for m in (model, prepared)]
    assert torch.equal(*texts)


class Uncached(nn.Module):
    """A user's model: a call is all it has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, V)


def test_auto_leaves_a_model_without_a_cache_in_fp32():
    assert choose_precision("auto", Uncached()) == "fp32"
    assert choose_precision("bf16", Uncached()) == "bf16"
    assert choose_precision("fp32", drawn(True)) == "fp32"


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bf16_where_the_processor_is_fast_at_it(fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose_precision("auto", drawn(True)) == ("bf16" if fast else "fp32")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no GPU here"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")
