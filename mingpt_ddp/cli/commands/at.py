"""Repeat one training step of a run, and show the text that it trained on.

    python -m mingpt_ddp at RUN step=1234

RUN        path or fsspec URL of a run directory, or of a directory of snapshots
step       number of the step, or worst for the step with the largest logged loss (with trainer.log_every > 1 each logged
           loss is the mean of several steps)
without    number of a sequence in the printed list: repeat the step a second time without this sequence, and show the loss and
           the gradient norms of both repetitions
format     text (the default) or json
nproc_per_node
           number of ranks: 1, or as many as the run had. The default is 1 with ddp.reduction=canonical, and otherwise as many
           as the run had
words      additional arguments of the train command, such as words="--config-dir=DIR model=NAME" for your own code

Prints the source, the loss and the text of each sequence, with the highest loss first. Then prints the loss and the gradient
norms of the step, and whether the repeated step has the same bits as the original one. Training continues from the newest
snapshot before the step, in a temporary directory. Set snapshot.keep_every to keep snapshots for this command.
"""  # noqa: E501

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.cli.commands.replay import split_words
from mingpt_ddp.config.keys.fields import PositiveInt
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.terminal import echo


@dataclass(frozen=True, kw_only=True)
class AtConfig:
    """The keys of the command line, as the usage above describes them."""

    url: str
    step: PositiveInt | Literal["worst"]
    without: PositiveInt | None = None
    format: Literal["text", "json"] = "text"
    nproc_per_node: PositiveInt | None = None
    words: str = ""


def main() -> None:
    """Run `python -m mingpt_ddp at`."""
    run_command(__doc__ or "", run)


def run(config: AtConfig) -> int:
    """Repeat a step, and print its sequences, losses and gradient norms."""
    words = split_words(config.words)
    from mingpt_ddp.cli.at import look_at, print_look  # imports torch
    from mingpt_ddp.cli.replay import TEMPORARY

    raise_interrupts()  # so that Ctrl-C ends the training and deletes its directory
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as directory:
        found = look_at(
            config.url,
            config.step,
            Path(directory),
            config.without,
            config.nproc_per_node,
            words,
        )
    if config.format == "text":
        print_look(found, config.without)
    else:
        # A loss that is not finite becomes null.
        strict = json.loads(json.dumps(found), parse_constant=lambda name: None)
        echo(json.dumps(strict))
    return 0
