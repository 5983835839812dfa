"""Repeat a step of a run, and say which text it learnt from.

    python -m mingpt_ddp at RUN step=1234

RUN        a run directory, or a directory of snapshots; a path or any fsspec URL
step       a number, or worst for the step with the largest logged loss (with trainer.log_every > 1 that is a mean over
           steps)
without    repeat the step without a sequence, by its number in the list, and show loss and norms again
format     text (the default) or json
nproc_per_node
           1 repeats on one rank; by default as many as the run had, or 1 with ddp.reduction=canonical
words      more of the command line that trains, as in words="--config-dir=DIR model=NAME" for code of yours

Prints source, loss and text of each sequence, with the highest loss first; loss and gradient norms of the step; and
whether it has the same bits as the run. The run goes on from its newest snapshot before the step, in a temporary
directory: snapshot.keep_every keeps snapshots for this.
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
    """Repeat a step, and print what was found."""
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
