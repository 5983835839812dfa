"""The keys of the models and of the parts in their blocks. Users can extend both."""

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

    name: str = neutral(..., "Label of the model in directory names and logs.")
    architecture: str = key(
        ..., "Model to build: gpt, modern, or the name that your code registers."
    )


@dataclass(frozen=True)
class PartConfig:
    """Base for the keys of your own part of a decoder's block, set by model.part_settings."""


# The registered parts of a block, by kind and name. If a key such as model.mlp is null, the
# architecture uses its own part.
PARTS: dict[str, dict[str | None, type]] = {
    "attention": {},
    "mlp": {},
    "norm": {},
    "activation": dict.fromkeys(("gelu", "gelu_tanh", "relu_squared"), PartConfig),
}
ACTIVATION = (
    "Activation of the MLP: gelu, gelu_tanh (as in GPT-2), relu_squared, or the name that your "
    "code registers."
)
# The standard activations of each architecture. Other programs support models with them.
STANDARD_ACTIVATIONS = {"gpt": ("gelu", "gelu_tanh"), "modern": ("relu_squared",)}


def changed_parts(model: Mapping[str, Any]) -> list[str]:
    """List the parts of the blocks that are not standard for the architecture: [model.mlp=mine].

    Args:
        model: The keys of the group `model`. They may be untrusted.
    """
    activations = STANDARD_ACTIVATIONS.get(str(model["architecture"]))
    if activations is None:
        # The user's own model is not made of these blocks. Its keys may have the same names.
        return []
    known = (None, *activations)
    return [f"model.{kind}={model[kind]}" for kind in PARTS if model.get(kind) not in known]


def model_label(model: ModelConfig) -> str:
    """Describe a model for messages: gpt, or gpt with model.mlp=mine."""
    return " with ".join([model.architecture, *changed_parts(vars(model))])


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The keys of the built-in decoders."""

    n_layer: Annotated[PositiveInt, Field(le=1_000)] = key(..., "Number of blocks.")
    n_head: Annotated[PositiveInt, Field(le=1_000_000)] = key(
        ..., "Number of attention heads per block. Must divide model.n_embd."
    )
    n_embd: Annotated[PositiveInt, Field(le=1_000_000)] = key(
        ..., "Width of the residual stream.", "features"
    )
    dropout: DecayFactor = key(
        0.0, "Share of the activations that dropout sets to zero.", "probability"
    )
    attention: str | None = key(
        None, "Your registered attention. null uses the architecture's own."
    )
    mlp: str | None = key(None, "Your registered MLP. null uses the architecture's own.")
    norm: str | None = key(None, "Your registered norm. null uses the architecture's own.")
    activation: str = key("gelu", ACTIVATION)
    part_settings: dict[str, Any] | None = key(
        None, "Settings of your registered parts by key, as in {window: 8}."
    )

    def __post_init__(self) -> None:
        self.part_configs()
        check(
            self.n_embd % self.n_head == 0,
            f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}",
        )

    def part_configs(self) -> dict[str, PartConfig]:
        """Build the configuration of each chosen part from model.part_settings, by kind.

        Raises:
            NotRegisteredError: No file has registered a chosen part.
            ConfigError: A setting is invalid. The message names it.
        """
        settings = self.part_settings or {}
        # For each key: the first part that has the key, and the type of the key there.
        known: dict[str, tuple[str, Any]] = {}
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
                first_label, wanted = known.setdefault(field, (label, plain))
                check(
                    plain == wanted,
                    f"{first_label} and {label} both have the key {field}, but with different "
                    f"types, {formatannotation(wanted)} and {formatannotation(plain)}; rename one "
                    "of the keys",
                )
            values = {name: settings[name] for name in fields if name in settings}
            configs[kind] = build(classes[name], values, "model.part_settings")
        where = "model.part_settings."
        chosen = " or ".join(changed_parts(vars(self)))
        for setting in settings:
            owner = f" of {chosen}" if chosen else ""
            hint = (
                hint_at(str(setting), sorted(known), where)
                if known
                else "choose a part that has this key"
            )
            check(setting in known, f"{where}{setting} is not a key{owner}; {hint}")
        return configs


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A GPT-2 style decoder (mingpt_ddp/models/gpt.py)."""

    bias: bool = key(False, "Use biases in linear layers and layer norms, as GPT-2 does.")


@dataclass(frozen=True, kw_only=True)
class ModernConfig(TransformerConfig):
    """A decoder with rotary position embeddings and no biases or gains (mingpt_ddp/models)."""

    activation: str = key("relu_squared", ACTIVATION)
    ngram_rows: Annotated[NonNegativeInt, Field(le=1 << 24)] = key(
        0,
        "Size of a table of vectors, which are looked up by hashes of the newest 2, 3, 4 and "
        "5 tokens. 0 means no table.",
        "rows",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.n_embd // self.n_head % 2 == 0,
            f"model.n_embd={self.n_embd} divided by model.n_head={self.n_head} must be even, for "
            "rotary positions; change one of them",
        )
        check(
            self.ngram_rows == 0 or self.n_embd % 4 == 0,
            f"model.n_embd={self.n_embd} must be divisible by 4 with model.ngram_rows",
        )
