"""User parts for the blocks of gpt and modern, tested with those of examples/parts."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from launching import ROOT
from multiprocess.ranks import configure
from pydantic import Field
from tasks import text_task
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.builders import BUILDERS, register, run_code
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.keys.model_config import PARTS, PartConfig, changed_parts
from mingpt_ddp.config.user_code import uses_user_code
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.distributed.device.compile import should_compile
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.tensor_split import check_tensor_parallel
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.inference.generate import SamplingParams, generate
from mingpt_ddp.models import build_model, has_cache, has_graph_step
from mingpt_ddp.parts import Attention, RotaryAttention, causal_attention
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.tasks.causality import check_is_causal_lm
from mingpt_ddp.training.dry_run.trial_run import DryRun
from mingpt_ddp.training.dry_run.user_code import check_parts, check_resumes_exactly

T, V = 16, 11
CHOICES = [
    ["model.attention=temperature", "model.activation=snake"],
    ["model.attention=alibi", "model.part_settings={steepness: 4}", "model.norm=rms"],
    ["model.attention=mean", "model.mlp=swiglu"],
    ["model.activation=relu_squared", "model.mlp=swiglu"],
    ["model.activation=gelu"],
]


@pytest.fixture(autouse=True)
def registered():
    run_code({"model": {"code": "parts.py"}}, [ROOT / "examples" / "parts"])
    yield
    run_code({}, [])


@pytest.fixture
def own():
    """Return a function that registers a part under the name "own"."""
    kinds = []

    def add(kind: str, part: Any, config: type = PartConfig) -> None:
        kinds.append(kind)
        register(kind, "own", config)(part)

    yield add
    for kind in kinds:
        del PARTS[kind]["own"], BUILDERS[kind]["own"]


def config(*overrides: str, model: str = "gpt_nano") -> Config:
    small = [f"model={model}", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"]
    return from_mapping(configure(*small, f"data.block_size={T}", *overrides))


def built(*overrides: str, model: str = "gpt_nano") -> nn.Module:
    torch.manual_seed(1)
    return build_model(config(*overrides, model=model).model, V, T)


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.eval()


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(V, (batch, T), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("model", ["gpt_nano", "modern_nano"])
@pytest.mark.parametrize("parts", CHOICES, ids=" ".join)
def test_a_part_trains_and_samples_the_same_with_a_cache(parts, model):
    """check_is_causal_lm, which also runs before training, covers causality and the cache."""
    made = randomized(built(*parts, model=model))
    assert has_cache(made) == ("model.attention=mean" not in parts)
    x, y = tokens(), tokens().flip(1)
    check_is_causal_lm(made, "mine", V, x, y)
    made(x, y).backward()
    assert all(p.grad is not None for p in made.parameters())
    steps = list(generate(made, x[:, :3], T, SamplingParams(temperature=0)))
    made.has_cache = False
    again = list(generate(made, x[:, :3], T, SamplingParams(temperature=0)))
    assert torch.equal(torch.stack(steps), torch.stack(again))


def test_a_part_gets_its_keys_and_does_not_change_the_rest_of_the_model():
    plain, alibi = built(), built("model.attention=alibi")
    assert plain.state_dict().keys() == alibi.state_dict().keys()
    steep = built("model.attention=alibi", "model.part_settings.steepness=4")
    slopes = steep.get_submodule("blocks.1.attention").slopes
    assert slopes.tolist() == [2.0**-2, 2.0**-4]


@pytest.mark.parametrize("model", ["gpt_nano", "modern_nano"])
def test_initial_weights(model):
    """Linear layers get the model's initial weights. Other parameters keep the constructor's."""
    names = dict(built("model.attention=temperature", "model.mlp=swiglu", model=model).state_dict())
    of_gate, of_down = names["blocks.0.mlp.gate.weight"], names["blocks.0.mlp.down.weight"]
    deviations = {"gpt_nano": (0.02, 0.01), "modern_nano": (0.25, 0)}[model]
    assert (float(of_gate.std()), float(of_down.std())) == pytest.approx(deviations, rel=0.1)
    assert names["blocks.0.attention.scale"].tolist() == [1, 1]


def test_attention_with_a_bias_agrees_with_the_formula():
    """In bf16 on a CPU, attention is computed in blocks of queries, also after cached keys."""
    q, k, v = torch.randn(3, 2, 2, 100, 8).unbind(0)
    bias = torch.randn(2, 100, 100)
    scores = q @ k.mT / 8**0.5 + bias
    is_later = torch.ones(100, 100, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1) @ v
    torch.testing.assert_close(causal_attention(q, k, v, bias=bias), expected)
    low = causal_attention(*(each.bfloat16() for each in (q, k, v)), bias=bias)
    torch.testing.assert_close(low.float(), expected, atol=0.05, rtol=0.05)
    last = causal_attention(q[:, :, 90:], k, v, bias=bias[:, 90:])
    torch.testing.assert_close(last, expected[:, :, 90:])


class Shifted(nn.Module):
    """An MLP that uses the previous token without declaring that it does."""

    def __init__(self, config, block):
        super().__init__()
        self.down = nn.Linear(block.n_embd, block.n_embd)

    def forward(self, x):
        return self.down(F.pad(x, (0, 0, 1, -1)))


class Honest(Shifted):
    recomputes = True


class NoArguments(nn.Module):
    def __init__(self):
        super().__init__()


class Pair(NamedTuple):
    config: Any
    block: Any


class NoCache(Attention):
    def forward(self, x):
        return x


class NoForward(nn.Module):
    def __init__(self, config, block):
        super().__init__()


@pytest.mark.parametrize(
    ("kind", "part", "error"),
    [
        ("mlp", NoArguments, r"the mlp own must take \(config, block\): too many"),
        ("norm", Pair, "the norm own must be an nn.Module, not Pair"),
        ("mlp", NoForward, "the mlp own must have a method forward"),
        ("attention", NoCache, r"forward of the attention own must take \(x, cache, start\)"),
        ("activation", lambda x: x, r"the activation own must take \(x, config\)"),
        ("attention", RotaryAttention, "model.attention=own is a RotaryAttention, which needs"),
    ],
)
def test_objects_that_are_not_a_part_are_refused(own, kind, part, error):
    own(kind, part)
    with pytest.raises((CodeError, ConfigError), match=error):
        built(f"model.{kind}=own")


def test_a_subclass_of_modern_s_rotary_attention_gets_all_its_arguments(own):
    own("attention", RotaryAttention)
    variant = built("model.attention=own", model="modern_nano")
    plain = built(model="modern_nano")
    assert torch.equal(variant(tokens()), plain(tokens()))
    assert has_cache(variant) and has_graph_step(plain)
    assert not has_graph_step(variant), "a class says so itself"


SETTINGS = "model.part_settings"


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["model.attention=alibbi"], "alibbi must be one of .*; did you mean alibi"),
        (["model.norm=alibi"], "must be one of rms; null is the architecture's own$"),
        (
            ["model.attention=alibi", f"{SETTINGS}={{steepnes: 1}}"],
            "steepnes is not a key of model.attention=alibi; did you mean model.part_settings.s",
        ),
        (
            [f"{SETTINGS}={{steepness: 1}}"],
            "steepness is not a key; choose a part that has this key",
        ),
        (
            ["model.attention=mean", "model.norm=rms", f"{SETTINGS}={{width: 1}}"],
            "width is not a key of model.attention=mean or model.norm=rms; choose a part that "
            "has this key$",
        ),
        (
            ["model.attention=alibi", f"{SETTINGS}={{steepness: x}}"],
            "model.part_settings.steepness='x' must be a number",
        ),
    ],
)
def test_a_mistyped_key_gives_one_line(overrides, error):
    with pytest.raises(ConfigError, match=error):
        config(*overrides)


@dataclass(frozen=True)
class Wide(PartConfig):
    width: Annotated[int, Field(ge=1)] = 8


@dataclass(frozen=True)
class Wider(PartConfig):
    width: int = 8


@dataclass(frozen=True)
class Named(PartConfig):
    width: str = "wide"


def test_parts_share_a_key_of_one_type(own):
    own("attention", Attention, Wide)
    own("mlp", Shifted, Wider)
    model: Any = config("model.attention=own", "model.mlp=own", "model.part_settings.width=3").model
    parts = model.part_configs()
    assert (parts["attention"].width, parts["mlp"].width) == (3, 3)
    own("norm", Shifted, Named)
    owners = "model.attention=own and model.norm=own both have the key width"
    message = f"{owners}, but with different types, int and"
    with pytest.raises(ConfigError, match=f"{message} str; rename one of the keys$"):
        config("model.attention=own", "model.norm=own")


def test_features_that_do_not_support_parts_refuse_or_skip_them(monkeypatch):
    chosen = config("model.attention=alibi", "ddp.tensor_parallel=2")
    with pytest.raises(
        ConfigError, match=r"original parts.*, without model.attention=alibi; other"
    ):
        check_tensor_parallel(chosen)
    assert uses_user_code(chosen) and not uses_user_code(config())
    able = "mingpt_ddp.distributed.device.compile._missing_requirement"
    monkeypatch.setattr(able, lambda device: None)  # any machine can compile
    gpu = torch.device("cuda")
    assert should_compile(config(), gpu)
    assert not should_compile(config("model.attention=alibi"), gpu)


def test_part_keys_at_their_defaults_do_not_change_the_run_name():
    values: dict[str, Any] = config().to_dict()
    for key in ("attention", "mlp", "norm", "part_settings"):
        del values["model"][key]
    assert from_mapping(values).digest() == config().digest()
    assert config("model.attention=alibi").digest() != config().digest()
    assert changed_parts({"architecture": "own", "attention": "x"}) == []


def preflight(*overrides: str, model: str = "gpt_nano") -> None:
    chosen = config(*overrides, "trainer.batch_size=2", model=model)
    runtime = Runtime(chosen, DistEnv())
    batch = [MicroBatch(0, (tokens(), tokens().flip(1)))]
    loader: Any = SimpleNamespace(
        steps_per_epoch=1000, items_per_step=1, get_batch=lambda *_: batch
    )
    dry_run = DryRun(runtime, text_task(chosen, vocab_size=V), loader, BatchPlan(2, 2, 1))
    check_resumes_exactly(dry_run, check_parts(dry_run))


class Whole(Attention):
    """Attention that sees all positions."""

    def attend(self, q, k, v, cache=None, start=0, bias=None):
        return F.scaled_dot_product_attention(q, k, v)


class Peek(Attention):
    """Attention that also sees the next position."""

    def attend(self, q, k, v, cache=None, start=0, bias=None):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class IgnoresStart(Attention):
    def attend(self, q, k, v, cache=None, start=0, bias=None):
        positions = torch.arange(q.shape[2]).view(-1, 1)
        return super().attend(q * (1 + positions / 10), k, v, cache, start, bias)


@pytest.mark.parametrize("model", ["gpt_nano", "modern_nano"])
@pytest.mark.parametrize(
    ("kind", "part", "problem"),
    [
        ("attention", Whole, "is not causal: its logits at a position depend on later"),
        ("attention", Peek, "is not causal"),
        ("attention", IgnoresStart, "decodes different logits"),
        ("mlp", Shifted, "decodes different logits with its cache than without it; .*recomputes"),
        ("mlp", Honest, None),
        ("activation", lambda x, config: x * torch.rand(()).item(), "is (random|not causal)"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(own, kind, part, problem, model):
    """This includes mistakes that hardly change the logits. The error names the part."""
    own(kind, part)
    if problem is None:
        return preflight(f"model.{kind}=own", model=model)
    name = model.removesuffix("_nano")
    with pytest.raises(CodeError, match=f"the model {name} with model.{kind}=own {problem}"):
        preflight(f"model.{kind}=own", model=model)


class Values(RotaryAttention):
    def forward(self, x, rotary, v1, cache, start):
        return super().forward(x, rotary, v1, cache, start)[0]


OF_SHAPE = r"must return a tensor of shape \(B, T, C\), here \(2, 1, 16\), not"


@pytest.mark.parametrize(
    ("kind", "part", "problem"),
    [
        ("attention", lambda x, config: (x, None), f"{OF_SHAPE} tuple"),
        ("attention", lambda x, config: None, f"{OF_SHAPE} NoneType"),
        ("attention", lambda x, config: F.pad(x, (0, 1)), rf"{OF_SHAPE} \(2, 1, 17\)"),
        ("mlp", lambda x, config: x[..., :1], rf"{OF_SHAPE} \(2, 1, 1\)"),
        ("norm", lambda x, config: x[0], rf"{OF_SHAPE} \(1, 16\)"),
        ("attention", Values, "and the attention values v1 of the first block, not a Tensor alone"),
    ],
)
def test_an_output_of_the_wrong_shape_is_refused(own, kind, part, problem):
    own(kind, part)
    model = "modern_nano" if part is Values else "gpt_nano"
    with pytest.raises(CodeError, match=f"^code error: model.{kind}=own .*{problem}"):
        preflight(f"model.{kind}=own", model=model)
