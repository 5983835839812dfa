"""Train some steps of a run again, and check that the weights have the recorded hashes.

    python -m mingpt_ddp replay RUN steps=100

RUN        path or fsspec URL of a run directory, or of a directory of snapshots
steps      number of steps between a snapshot (or the start of the run) and a later snapshot
nproc_per_node
           number of ranks. With ddp.reduction=canonical, it can be any number, and the default is 1. Otherwise it must be the
           number of ranks that the run had, which is the default
words      additional arguments of the train command, such as words="--config-dir=DIR model=NAME" for your own code

The exit code is 0 if model, optimizer and EMA have the recorded hashes. It is 1 if a hash differs. It is 3 if a hash differs
but the cause may be something other than damage, such as a different GPU.

A replay finds damage that ranks cannot find by comparing each other: a flipped bit in an activation or a gradient, or a
snapshot that was changed together with its manifest.
"""  # noqa: E501

import shlex
from dataclasses import dataclass

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.config.keys.fields import PositiveInt
from mingpt_ddp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """The keys of the command line, as the usage above describes them."""

    url: str
    steps: PositiveInt
    nproc_per_node: PositiveInt | None = None
    words: str = ""


def main() -> None:
    """Run `python -m mingpt_ddp replay`."""
    run_command(__doc__ or "", run)


def run(config: ReplayConfig) -> int:
    """Repeat steps, and print whether they confirm the recorded hashes."""
    from mingpt_ddp.cli.replay import replay  # imports torch

    return replay(config.url, config.steps, config.nproc_per_node, split_words(config.words))


def split_words(text: str) -> list[str]:
    """Split a text into the words of a command line.

    Raises:
        ConfigError: A quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"words={text} cannot be read as a command line: {error}") from error
