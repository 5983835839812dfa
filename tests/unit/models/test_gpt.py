"""The gpt model is causal, agrees with GPT-2, and has its published number of parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import yaml
from tasks import gpt_config
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.keys.model_config import GPTConfig, ModernConfig
from mingpt_ddp.models import build_model, count_parameters

torch.set_num_threads(1)  # more threads only slow down tensors this small

T, V = 16, 31
M = TypeVar("M", bound=nn.Module)
CONF = Path(__file__).resolve().parents[3] / "conf"


def config(**changes) -> GPTConfig:
    return gpt_config(**{"activation": "gelu_tanh", **changes})


def randomized(model: M, seed: int = 0) -> M:
    """Set every parameter to random values that are large enough to matter. Turn dropout off."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def random_tokens(batch: int = 2, length: int = T) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(3))


MODERN = ModernConfig(
    name="test", architecture="modern", n_layer=2, n_head=2, n_embd=16, dropout=0.0
)
NGRAMS = replace(MODERN, ngram_rows=50)


@pytest.fixture(params=[config(), MODERN, NGRAMS], ids=["gpt", "modern", "ngrams"])
def model(request) -> nn.Module:
    return randomized(build_model(request.param, V, T))


# Causality


def test_no_logit_depends_on_a_later_token(model):
    """Changing a token changes the logits from its position on, and none before."""
    tokens = random_tokens()
    with torch.no_grad():
        plain = model(tokens)
        for position in range(T):
            other = tokens.clone()
            other[:, position] = (tokens[:, position] + 1) % V
            change = (plain - model(other)).abs().amax(dim=(0, 2))  # (T,)
            assert float(change[:position].sum()) == 0
            assert float(change[position:].min()) > 1e-4, "a later logit ignores the token"


@pytest.mark.parametrize("pieces", [[T], [1] * T, [5, 1, 1, 9], [1, 8, 7]], ids=str)
def test_the_logits_with_a_cache_equal_those_without(model, pieces):
    """The tokens may come in several pieces, so the logits with a cache are causal too.

    If a token saw a later token of its piece, its keys in the second layer would differ.
    """
    tokens = random_tokens()
    with torch.no_grad():
        expected = model(tokens)
        cache = model.new_cache(len(tokens), torch.float32)
        layers = cache if isinstance(cache, list) else [each.attention for each in cache.layers]
        for layer in layers:
            for tensor in (layer.keys, layer.values):
                tensor.fill_(torch.nan)  # entries that were not written must not be read
        start = 0
        for piece in pieces:
            scores = model.decode(tokens[:, start : start + piece], cache, start)
            start += piece
            torch.testing.assert_close(scores, expected[:, start - 1], atol=1e-5, rtol=1e-5)


def test_a_step_with_its_position_in_a_tensor_gives_the_same_logits(model):
    """It does so again after a restart at position 0, when the cache has stale entries."""
    tokens = random_tokens()
    with torch.no_grad():
        expected = model(tokens)
        cache = model.new_cache(len(tokens), torch.float32)
        for begin in (0, 5, 1):
            if begin:
                model.decode(tokens[:, :begin], cache, 0)
            for position in range(begin, T):
                scores = model.step(tokens[:, position], cache, torch.tensor(position))
                torch.testing.assert_close(scores, expected[:, position], atol=1e-5, rtol=1e-5)


def test_more_tokens_than_the_context_length_are_refused(model):
    with pytest.raises(ValueError, match="17 tokens exceed the context length of 16"):
        model(random_tokens(length=T + 1))
    with pytest.raises(ValueError, match="17 tokens"):
        model.decode(random_tokens(length=1), model.new_cache(2, torch.float32), T)


# Exported graphs


@pytest.mark.parametrize("model", [NGRAMS], indirect=True, ids=["ngrams"])
def test_a_graph_of_torch_export_takes_any_length(model):
    """It also takes any number of sequences, and has the gradients of the model.

    The test with ONNX Runtime below covers gpt.
    """
    sizes = {0: torch.export.Dim("B", min=1), 1: torch.export.Dim("T", min=1, max=T)}
    example = (random_tokens(length=5),)
    program = torch.export.export(model, example, dynamic_shapes={"tokens": sizes})
    for batch, length in ((1, 1), (2, 2), (3, 3), (2, T)):
        tokens = random_tokens(batch, length)
        torch.testing.assert_close(program.module()(tokens), model(tokens), atol=1e-6, rtol=0)
    exported = program.module()
    exported(tokens).square().mean().backward()
    model(tokens).square().mean().backward()
    expected = dict(model.named_parameters())
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)


@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(of, marks=pytest.mark.integration) for of in (config(), NGRAMS)),
        # The model with n-grams has the same parts and more.
        pytest.param(MODERN, marks=pytest.mark.slow),
    ],
    indirect=True,
    ids=["gpt", "ngrams", "modern"],
)
def test_onnx_runtime_gives_the_same_logits(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    sizes = {0: "batch", 1: "length"}
    program = torch.onnx.export(
        model, (random_tokens(length=5),), dynamic_shapes={"tokens": sizes}, dynamo=True
    )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch, length in ((1, 1), (2, 2), (3, 3), (2, T)):
        tokens = random_tokens(batch, length)
        [logits] = session.run(None, {"tokens": tokens.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(logits), model(tokens), atol=1e-4, rtol=0)


# GPT-2

NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "norm_1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "norm_2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def gpt2_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    if layer.startswith("blocks."):
        _, number, part = layer.split(".", 2)
        return f"transformer.h.{number}.{NAMES[part]}.{kind}"
    return f"{NAMES[layer]}.{kind}"


def is_transposed(name: str) -> bool:
    """Return True if GPT-2 stores this tensor transposed: the matrices of its linear layers."""
    return name.startswith("blocks.") and name.endswith("weight") and "norm" not in name


@pytest.fixture
def gpt2():
    """Return the GPT-2 of the transformers library, with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    settings = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=V, n_positions=T)
    return transformers.GPT2LMHeadModel(settings).eval()


@pytest.mark.integration
def test_logits_and_loss_equal_those_of_gpt2_with_the_same_weights(gpt2):
    model = build_model(config(), V, T).eval()
    theirs = {k: v.clone() for k, v in gpt2.state_dict().items()}
    names = {name: gpt2_name(name) for name in model.state_dict()}
    assert set(theirs) - {"lm_head.weight"} == set(names.values())
    model.load_state_dict(
        {k: theirs[n].T if is_transposed(k) else theirs[n] for k, n in names.items()}
    )
    tokens = random_tokens()
    with torch.no_grad():
        expected = gpt2(tokens, labels=tokens)
        torch.testing.assert_close(model(tokens), expected.logits, atol=1e-5, rtol=1e-5)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=1e-5)
        randomized(model)
        ours = {gpt2_name(k): v.T if is_transposed(k) else v for k, v in model.state_dict().items()}
        missing, unexpected = gpt2.load_state_dict(ours, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, "transformer.wte.weight"
        gpt2.tie_weights()
        torch.testing.assert_close(gpt2(tokens).logits, model(tokens), atol=1e-4, rtol=1e-5)
        assert float(model(tokens).std()) > 0.1


# Parameters


@pytest.mark.parametrize("model", [config()], indirect=True)
def test_embedding_and_head_are_one_tensor(model):
    shapes = [tuple(tensor.shape) for tensor in model.state_dict().values()]
    assert shapes.count((V, 16)) == 1
    hidden = []
    model.norm.register_forward_hook(lambda _, __, output: hidden.append(output))
    with torch.no_grad():
        scores = model(random_tokens())
    torch.testing.assert_close(scores, hidden[0] @ model.token_embedding.weight.T)


def preset(name: str) -> GPTConfig:
    values = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    del values["defaults"]  # the dataclass has these values
    return GPTConfig(architecture="gpt", **values)


@pytest.mark.parametrize(
    ("name", "vocabulary", "count"), [("gpt2", 50257, 124_439_808), ("gpt2", 65, 85_892_352)]
)
def test_gpt2_small_has_its_published_size(name, vocabulary, count):
    with torch.device("meta"):
        model = build_model(preset(name), vocabulary, 1024)
    assert count_parameters(model) == count


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_flops_by_hand(bias):
    """The model has C = 8 and L = 3.

    A block has 12 C^2 + 2 C weights. With biases, the last term is 13 C: 3 + 1 + 4 + 1 in the
    linear layers and 2 + 2 in the norms. Each weight of a matrix product takes 6 FLOPs per token,
    also in the tied head. Attention takes 12 L C T.
    """
    model = build_model(config(n_layer=3, n_embd=8, bias=bias), V, T)
    blocks = 3 * (12 * 64 + (13 * 8 if bias else 2 * 8)) + (16 if bias else 8)
    assert count_parameters(model) == blocks + (V + T) * 8
    assert model.flops_per_token() == 6 * (blocks + V * 8) + 12 * 3 * 8 * T


def test_initial_weights():
    """The standard deviation is 0.02, or 0.02 / sqrt(2 L) in layers that write to the residual
    stream. Biases are 0 and norms are 1.
    """
    torch.manual_seed(0)
    model = build_model(config(n_layer=8, n_embd=128), 500, 64)
    for name, parameter in model.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            assert torch.all(parameter == (1 if name.endswith("weight") else 0)), name
        else:
            expected = 0.005 if name.endswith(("proj.weight", "down.weight")) else 0.02
            assert float(parameter.std()) == pytest.approx(expected, rel=0.05), name
            assert abs(float(parameter.mean())) < expected / 20, name


@pytest.mark.parametrize("vocabulary", [10, 1000])
def test_the_initial_loss_is_the_loss_of_a_uniform_distribution(vocabulary):
    torch.manual_seed(0)
    model = build_model(config(n_layer=4, n_head=4, n_embd=64), vocabulary, 32)
    x, y = torch.randint(vocabulary, (2, 64, 32))
    assert model(x, y).item() == pytest.approx(math.log(vocabulary), abs=0.1)


def test_the_loss_is_the_mean_cross_entropy_in_nats(model):
    x, y = random_tokens(), random_tokens().flip(1)
    with torch.no_grad():
        scores = model(x).double()
        by_hand = [-F.log_softmax(scores[b, t], -1)[y[b, t]] for b in range(2) for t in range(T)]
        assert float(model(x, y)) == pytest.approx(float(sum(by_hand)) / (2 * T), rel=1e-5)


# Dropout


def test_dropout_is_active_only_in_training():
    plain, dropped = (randomized(build_model(config(dropout=p), V, T)) for p in (0.0, 0.5))
    tokens = random_tokens()
    with torch.no_grad():
        assert torch.equal(plain(tokens), dropped(tokens))
        dropped.train()
        torch.manual_seed(0)
        first, second = dropped(tokens), dropped(tokens)
        torch.manual_seed(0)
        again = dropped(tokens)
    assert not torch.allclose(first, second)
    assert torch.equal(first, again)


def test_dropout_is_where_gpt2_has_it():
    """It follows the embeddings, and acts on the attention weights and on the outputs that the
    layers add to the residual stream.
    """
    rate = 0.25
    model = randomized(build_model(config(n_layer=1, dropout=rate), V, T)).train()
    seen: dict[str, Tensor] = {}
    inputs = {"norm_1": "embedding", "norm_2": "residual", "attention.proj": "attention"}
    for name, part in inputs.items():
        layer = model.blocks[0].get_submodule(name)
        layer.register_forward_pre_hook(lambda _, args, part=part: seen.update({part: args[0]}))
    torch.manual_seed(0)
    with torch.no_grad():
        model(random_tokens(batch=500))
    seen["residual"] = seen["residual"] - seen["embedding"]
    zero = {part: value == 0 for part, value in seen.items()}  # (B, T, C)
    # The first token attends only to itself. In each head, this one weight is dropped or not.
    zero["attention"] = zero["attention"][:, 0].unflatten(-1, (2, 8)).all(dim=-1)  # (B, H)
    shares = {part: float(value.float().mean()) for part, value in zero.items()}
    assert shares == pytest.approx(dict.fromkeys(inputs.values(), rate), abs=0.05)
