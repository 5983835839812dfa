"""The keys of the models and of the parts of their blocks, which users can extend."""

# ruff: noqa: RUF009  key() returns a dataclass field
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import formatannotation
from typing import Annotated, Any, get_type_hints

from pydantic import Field

from mingpt_ddp.config.keys.components import UserCodeConfig
from mingpt_ddp.config.keys.fields import DecayFactor, NonNegativeInt, PositiveInt, key, neutral
from mingpt_ddp.config.validation import build, check, check_choice, field_types, hint_at


@dataclass(frozen=True, kw_only=True)
class ModelConfig(UserCodeConfig):
    """The keys of every model."""

    name: str = neutral(..., "a label for directories and logs")
    architecture: str = key(..., "the registered model to build: gpt, modern or your own")


@dataclass(frozen=True)
class PartConfig:
    """The keys of a part of your own in the blocks of a decoder: model.part_settings."""


# The registered parts of a block by kind and name. Without a name the architecture has its own.
PARTS: dict[str, dict[str | None, type]] = {
    "attention": {},
    "mlp": {},
    "norm": {},
    "activation": dict.fromkeys(("gelu", "gelu_tanh", "relu_squared"), PartConfig),
}
ACTIVATION = "of the MLP: gelu, gelu_tanh (GPT-2's), relu_squared or your own"
# The activations of an architecture, which other programs know.
OWN_ACTIVATIONS = {"gpt": ("gelu", "gelu_tanh"), "modern": ("relu_squared",)}


def changed_parts(model: Mapping[str, Any]) -> list[str]:
    """Return the parts that are not the architecture's own, as in [model.mlp=mine].

    Args:
        model: the group `model`, perhaps untrusted.
    """
    activations = OWN_ACTIVATIONS.get(str(model["architecture"]))
    if activations is None:  # not a decoder of blocks; its keys may have these names
        return []
    known = (None, *activations)
    return [f"model.{kind}={model[kind]}" for kind in PARTS if model.get(kind) not in known]


def model_label(model: ModelConfig) -> str:
    """Return what is built, for messages: gpt, or gpt with model.mlp=mine."""
    return " with ".join([model.architecture, *changed_parts(vars(model))])


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The keys of the built-in decoders."""

    n_layer: Annotated[PositiveInt, Field(le=1_000)] = key(..., "blocks")
    n_head: Annotated[PositiveInt, Field(le=1_000_000)] = key(
        ..., "attention heads per block; a divisor of n_embd"
    )
    n_embd: Annotated[PositiveInt, Field(le=1_000_000)] = key(
        ..., "width of the residual stream", "features"
    )
    dropout: DecayFactor = key(
        0.0, "fraction of the activations that dropout zeroes", "probability"
    )
    attention: str | None = key(None, "your registered attention; null: the architecture's")
    mlp: str | None = key(None, "your registered MLP; null: the architecture's")
    norm: str | None = key(None, "your registered norm; null: the architecture's")
    activation: str = key("gelu", ACTIVATION)
    part_settings: dict[str, Any] | None = key(
        None, "keys of parts of your own by name, as in {window: 8}"
    )

    def __post_init__(self) -> None:
        self.part_configs()
        check(
            self.n_embd % self.n_head == 0,
            f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}",
        )

    def part_configs(self) -> dict[str, PartConfig]:
        """Return the keys of the chosen parts by kind, each as its class.

        Raises:
            NotRegisteredError: no file has registered a part.
            ConfigError: names the key of a part that is invalid.
        """
        settings = self.part_settings or {}
        known: dict[str, tuple[str, Any]] = {}  # a part that has the key, and the key's type
        configs: dict[str, PartConfig] = {}
        for kind, classes in PARTS.items():
            name = getattr(self, kind)
            if name is None:
                continue
            label = f"model.{kind}={name}"
            also = "" if kind == "activation" else "; null is the architecture's own"
            check_choice(f"model.{kind}", name, classes, also)
            fields = field_types(classes[name])
            plain_types = get_type_hints(classes[name])  # without Annotated
            for field in fields:
                plain = plain_types[field]
                kept_by, wanted = known.setdefault(field, (label, plain))
                check(
                    plain == wanted,
                    f"{kept_by} and {label} have a key {field} of different types, "
                    f"{formatannotation(wanted)} and {formatannotation(plain)}; rename one",
                )
            values = {name: settings[name] for name in fields if name in settings}
            configs[kind] = build(classes[name], values, "model.part_settings")
        where = "model.part_settings."
        chosen = " or ".join(changed_parts(vars(self)))
        for setting in settings:
            owner = f" of {chosen}" if chosen else ""
            hint = hint_at(str(setting), sorted(known), where) if known else "choose a part with it"
            check(setting in known, f"{where}{setting} is not a key{owner}; {hint}")
        return configs


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A GPT-2 style decoder (mingpt_ddp/models/gpt.py)."""

    bias: bool = key(False, "biases in linear layers and layer norms, as in GPT-2")


@dataclass(frozen=True, kw_only=True)
class ModernConfig(TransformerConfig):
    """A decoder with rotary position embeddings and no biases or gains (mingpt_ddp/models)."""

    activation: str = key("relu_squared", ACTIVATION)
    ngram_rows: Annotated[NonNegativeInt, Field(le=1 << 24)] = key(
        0, "table of vectors for hashes of the newest 2, 3, 4 and 5 tokens; 0: none", "rows"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.n_embd // self.n_head % 2 == 0,
            f"model.n_embd={self.n_embd} over model.n_head={self.n_head} must be even, for "
            "rotary positions",
        )
        check(
            self.ngram_rows == 0 or self.n_embd % 4 == 0,
            f"model.n_embd={self.n_embd} must be divisible by 4 with model.ngram_rows",
        )
