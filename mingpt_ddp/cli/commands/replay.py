"""Train some steps of a run again, and compare the hashes with the recorded ones.

    python -m mingpt_ddp replay RUN steps=100

RUN        a run directory, or a directory of snapshots; a path or any fsspec URL
steps      so many, from a snapshot or the start of the run to a later snapshot. Exit code 1 if the hashes of model,
           optimizer and EMA differ, 3 if that may have another cause than damage
nproc_per_node
           ranks of the replay; any number with ddp.reduction=canonical (1 by default), else as many as the run had
words      more of the command line that trains, as in words="--config-dir=DIR model=NAME" for code of yours

A replay finds what no comparison of ranks sees: a flipped bit in an activation or a gradient, and a snapshot that was
changed together with its manifest.
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
    """Return the words of a command line.

    Raises:
        ConfigError: A quotation is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"words={text} cannot be read as a command line: {error}") from error
