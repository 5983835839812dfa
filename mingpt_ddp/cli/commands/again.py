"""Train with the configuration that a run has recorded, and with changes.

    python -m mingpt_ddp again outputs/demo optimizer.lr=3e-4

RUN         a local run directory; its newest config.yaml counts, however the presets have changed since
key=value   the changes; also presets and options of Hydra, as for training

A change of a key that enters its name is another run: in a directory of its own, named like any unnamed run, or by
run.name=NAME.
Without one the run itself goes on: to print its result, to raise trainer.max_steps, or with another logging.

What a record should not decide is left out unless you type it: your Python files (code, without which it refuses),
commands to run, and where snapshots or logs are sent.
"""  # noqa: E501

import sys

from mingpt_ddp.cli.arguments import answer
from mingpt_ddp.cli.commands import train
from mingpt_ddp.distributed.root_cause import cli_errors
from mingpt_ddp.terminal import echo


def main() -> None:
    """Run `python -m mingpt_ddp again`."""
    with cli_errors():
        if text := answer(__doc__, sys.argv[1:]):
            echo(text)
            return
    train.main(_words)


def _words(arguments: list[str]) -> list[str]:
    """Return the words that train, for a run directory and changes."""
    from mingpt_ddp.cli.recorded_preset import store_recorded  # imports Hydra

    return store_recorded(arguments[0], arguments[1:])
