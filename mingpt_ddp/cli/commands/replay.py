"""Train some steps of a run again, and compare the hashes with the recorded hashes.

    python -m mingpt_ddp replay RUN steps=100

RUN        path or fsspec URL of a run directory, or of a directory of snapshots
steps      number of steps between a snapshot (or the start of the run) and a later snapshot
nproc_per_node
           number of ranks; with ddp.reduction=canonical any number (the default is 1), otherwise as many as the run had
words      more words for the command line that trains, such as words="--config-dir=DIR model=NAME" for your own code

The exit code is 0 if the hashes of model, optimizer and EMA are the same. It is 1 if they differ, and 3 if they differ but
the cause may be something other than damage, such as another GPU.

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
