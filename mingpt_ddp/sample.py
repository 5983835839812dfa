"""Generate text from a snapshot.

    python sample.py snapshot=outputs/demo prompt="The " max_new_tokens=500 temperature=0.8 top_k=40 seed=1

snapshot        a run directory, its snapshots or one of them; a path or any fsspec URL
prompt          what the text starts with; - reads it from standard input
max_new_tokens  characters to generate
temperature     below 1 is cautious, above 1 is bold, 0 always takes the likeliest character
top_k, top_p    only the k likeliest characters; only the likeliest that together have probability p
seed, samples   another seed gives another text; how many texts
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from mingpt_ddp import logs
from mingpt_ddp.errors import ConfigError, DataError, UserError
from mingpt_ddp.place import Place
from mingpt_ddp.schema import build, refuse_credentials


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
    logs.to_console(Place())
    try:
        config = parse(sys.argv[1:])
        prompt = _read_prompt() if config.prompt == "-" else config.prompt
        for number, text in enumerate(sample(config, prompt)):
            print(f"{'-' * 80}\n{text}" if number else text, flush=True)
    except BrokenPipeError:  # the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _read_prompt() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt on standard input is not UTF-8: {error}") from error


def parse(arguments: list[str]) -> SampleConfig:
    """`key=value` words; a prompt is taken literally, whatever it looks like."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument} is not of the form key=value")
        values[key] = text if key in ("snapshot", "prompt") else _number_or_text(text)
    return build(SampleConfig, values, "")


def _number_or_text(text: str) -> Any:
    if text in ("null", "None"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def sample(config: SampleConfig, prompt: str) -> list[str]:
    """The prompt and its continuations."""
    from mingpt_ddp.config import from_mapping  # torch is needed from here on, not for a mistyped key
    from mingpt_ddp.corpus import Vocabulary
    from mingpt_ddp.generate import generate_text
    from mingpt_ddp.model import build_model
    from mingpt_ddp.snapshots.store import load
    from mingpt_ddp.snapshots.tensors import load_model
    from mingpt_ddp.storage import check_url

    check_url(config.snapshot, "snapshot")
    found = load(config.snapshot)
    trained = from_mapping(found.state["config"])
    vocabulary = Vocabulary(found.state["vocabulary"])
    model = build_model(trained.model, len(vocabulary.characters), trained.data.block_size)
    load_model(model, found.model)
    texts = generate_text(
        model,
        vocabulary,
        prompt,
        config.max_new_tokens,
        config.seed,
        config.samples,
        config.temperature,
        config.top_k,
        config.top_p,
    )
    return [prompt + text for text in texts]


if __name__ == "__main__":
    main()
