"""Generate text from a snapshot.

    python sample.py snapshot=outputs/demo prompt="The " max_new_tokens=500 temperature=0.8 top_k=40 seed=1

snapshot        a run directory, its snapshots or one of them; a path or any fsspec URL
prompt          what the text starts with; - reads it from standard input
max_new_tokens  characters to generate
temperature     below 1 is cautious, above 1 is bold, 0 always takes the likeliest character
top_k, top_p    only the k likeliest characters; only the likeliest that together have probability p
seed, samples   another seed gives another text; how many texts
device          auto (the GPU if there is one), cpu or cuda
precision       auto (16 bits where the hardware is fast at it), fp32, bf16 or fp16; with another device or precision
                the same seed may give another text
code            your Python file that registers the model, if it is none of ours
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mingpt_ddp.config.validation import build, convert, refuse_credentials
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import cli_errors
from mingpt_ddp.errors import ConfigError, DataError, SnapshotError, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mingpt_ddp.config.schema import ModelConfig


@dataclass(frozen=True)
class SampleConfig:
    snapshot: str
    prompt: str = ""
    max_new_tokens: int = 500
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1
    samples: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    code: str | None = None

    def __post_init__(self) -> None:
        for key, least in (("max_new_tokens", 1), ("samples", 1), ("temperature", 0), ("seed", 0), ("top_k", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ConfigError(f"{key}={value} must be at least {least}")
        if not self.snapshot.strip():
            raise ConfigError("snapshot is empty; name a run directory")
        refuse_credentials("snapshot", self.snapshot)
        if self.samples > 10_000:
            raise ConfigError(f"samples={self.samples} must be at most 10000")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.seed >= 2**63:
            raise ConfigError(f"seed={self.seed} must be less than 2^63")


def main() -> None:
    """The entry point of sample.py and of `python -m mingpt_ddp.sample`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    logs.to_console(DistEnv())
    with cli_errors():
        config = parse(sys.argv[1:])
        prompt = _read_prompt() if config.prompt == "-" else config.prompt
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        for number, text in enumerate(sample(config, prompt)):
            text = printable(text) if sys.stdout.isatty() else text
            print(f"{'-' * 80}\n{text}" if number else text, flush=True)


def _read_prompt() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt on standard input is not UTF-8: {error}") from error


def parse(arguments: list[str]) -> SampleConfig:
    """`key=value` words; a prompt is taken literally, whatever it looks like."""
    return build(SampleConfig, values_of(arguments, literal=("snapshot", "prompt", "code")), "")


def values_of(arguments: list[str], literal: Collection[str]) -> dict[str, Any]:
    """The values of `key=value` words, by key.

    Args:
        literal: keys whose values are text, whatever they look like.

    Raises:
        ConfigError: a word is of another form.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument} is not of the form key=value")
        values[key] = text if key in literal else _plain_value(text)
    return values


def _plain_value(text: str) -> Any:
    words = {"null": None, "None": None, "true": True, "false": False}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def sample(config: SampleConfig, prompt: str) -> list[str]:
    """The prompt and its continuations.

    Raises:
        SnapshotError: there is no snapshot, or none that a model can be made of.
        DataError: the prompt has characters that the model does not know.
    """
    from mingpt_ddp.config.registry import attribute_errors_to_user_code, run_file
    from mingpt_ddp.data.dataset import CharTokenizer
    from mingpt_ddp.inference.decoding import choose_precision, prepare
    from mingpt_ddp.inference.generate import generate_text
    from mingpt_ddp.models.ops import choose_device  # torch is needed from here on, not for a mistyped key
    from mingpt_ddp.snapshots.load import load
    from mingpt_ddp.storage.storage import check_url

    check_url(config.snapshot, "snapshot")
    if config.code is not None:
        run_file(Path(config.code), "code")
    device = choose_device(config.device, "device")
    found = load(config.snapshot, kinds=("model",))
    trained = described(found.state)
    model = rebuild(trained, found.model)
    try:
        with attribute_errors_to_user_code():
            model.to(device)
            prepare(model, choose_precision(config.precision, model, config.samples), config.samples)
            texts = generate_text(
                model,
                CharTokenizer(trained.vocabulary),
                prompt,
                config.max_new_tokens,
                config.seed,
                config.samples,
                config.temperature,
                config.top_k,
                config.top_p,
            )
    except RuntimeError as error:  # weights that are no numbers, a context too long for the memory
        raise SnapshotError(f"the model of {config.snapshot} cannot be used: {error}") from error
    return [prompt + text for text in texts]


@dataclass(frozen=True)
class Trained:
    """What of a snapshot's state says how to use its weights, whoever wrote it."""

    architecture: str
    model: dict[str, Any]  # the configuration of the model, not checked
    block_size: int
    vocabulary: str


def described(state: Any) -> Trained:
    """
    Raises:
        SnapshotError: the state does not hold it.
    """
    from mingpt_ddp.snapshots.format import LARGEST_CONFIG

    try:
        characters, values = state["vocabulary"], state["config"]
        if not isinstance(characters, str) or len(json.dumps(values)) > LARGEST_CONFIG:
            raise ValueError("a vocabulary and a configuration were expected")
        size = convert(values["data"]["block_size"], int, "data.block_size")
        architecture = convert(values["model"]["architecture"], str, "model.architecture")
        return Trained(architecture, dict(values["model"]), max(1, size), characters)
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"the snapshot's state does not hold what it should: {error}") from error


def typed(trained: Trained) -> ModelConfig:
    """The configuration of the model, checked.

    Raises:
        SnapshotError: it is none, or that of a model whose code nobody has named.
    """
    from mingpt_ddp.config.config import UnknownCode, build_group

    try:
        config: ModelConfig = build_group("model", trained.model)
        return config
    except UnknownCode as error:
        raise SnapshotError(
            f"model.architecture={trained.architecture} is none of ours; name the Python file that registers it, "
            "if you trust it, as in code=my_project/mine.py"
        ) from error
    except (ConfigError, TypeError, ValueError) as error:
        raise SnapshotError(f"the snapshot's state does not hold what it should: {error}") from error


def rebuild(trained: Trained, tensors: dict[str, Tensor]) -> nn.Module:
    """The model of a snapshot around its own tensors: no number of the configuration makes ours larger than they are.

    Raises:
        SnapshotError: the tensors are not those of this configuration.
    """
    import torch

    from mingpt_ddp.config.registry import attribute_errors_to_user_code
    from mingpt_ddp.config.schema import GPTConfig
    from mingpt_ddp.models import build_model
    from mingpt_ddp.snapshots.state_dict import load_model_state

    vocab_size = len(trained.vocabulary)
    with attribute_errors_to_user_code():
        config = typed(trained)
        if not isinstance(config, GPTConfig):  # code of the user's, which may compute what no snapshot has
            model = build_model(config, vocab_size, trained.block_size)
            load_model_state(model, tensors)
            return model

    def blank(layers: int) -> nn.Module:
        with torch.device("meta"):  # shapes alone
            return build_model(replace(config, n_layer=layers), vocab_size, trained.block_size)

    layers = config.n_layer
    try:
        one, two = (len(blank(n).state_dict()) for n in (1, 2))
        if one + (layers - 1) * (two - one) != len(tensors):  # before so many blocks are made
            raise SnapshotError(f"the snapshot's {len(tensors)} tensors are not those of {layers} layers")
        model = blank(layers)
    except RuntimeError as error:  # more bytes than can be counted
        raise SnapshotError("the snapshot's weights do not fit the model: it is too large") from error
    load_model_state(model, tensors, assign=True)
    return model


if __name__ == "__main__":
    main()
