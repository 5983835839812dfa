"""Train with the configuration that a run has recorded, and with changes.

    python -m mingpt_ddp again outputs/demo optimizer.lr=3e-4

RUN         a local run directory; its newest config.yaml counts, however the presets have changed since
key=value   the changes; also presets and options of Hydra, as for training

A change of a key that enters its name is another run: in a directory of its own, named like any unnamed run, or by
run.name=NAME.
Without one the run itself goes on: to print its result, to raise trainer.max_steps, or with another logging.

The command that trains is printed. What a record should not decide is left out unless you type it: your Python files
(code, without which it refuses), commands to run, and where snapshots or logs are sent.
"""  # noqa: E501

import os
import shlex
import sys

from mingpt_ddp.cli.arguments import answer
from mingpt_ddp.cli.recorded_words import command_words
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.root_cause import cli_errors
from mingpt_ddp.errors import command
from mingpt_ddp.terminal import echo


def main() -> None:
    """Run `python -m mingpt_ddp again`."""
    with cli_errors():
        if text := answer(__doc__, sys.argv[1:]):
            echo(text)
            return
        words = command_words(sys.argv[1], sys.argv[2:])
        read_env().call_on_rank_zero(lambda: echo(f"{command()} {shlex.join(words)}"))
        os.execv(sys.executable, [sys.executable, "-m", "mingpt_ddp", *words])
