"""Train with the configuration that a run has recorded, and with changes.

    python -m mingpt_ddp again outputs/demo optimizer.lr=3e-4

RUN         a local run directory; its newest config.yaml is used, even if presets have changed since
key=value   what to change; presets and options of Hydra work as for training

If you change a key that enters the name of a run, this is a new run in a directory of its own. It is named like any
unnamed run, or by run.name=NAME.
Otherwise the recorded run itself goes on: to print its result, to reach a larger trainer.max_steps, to log more often.

A record does not decide which programs run or where files go. Values that would are left out unless you type them:
your Python files (code), and the places to which snapshots or logs are sent. If the run needs code that you have not
typed, the command refuses and names it.
"""  # noqa: E501

import sys

from mingpt_ddp.cli.arguments import answer
from mingpt_ddp.cli.commands import train
from mingpt_ddp.process.root_cause import cli_errors
from mingpt_ddp.process.terminal import echo


def main() -> None:
    """Run `python -m mingpt_ddp again`."""
    with cli_errors():
        if text := answer(__doc__, sys.argv[1:]):
            echo(text)
            return
    train.main(_words)


def _words(arguments: list[str]) -> list[str]:
    """Turn the arguments, a run directory and changes, into the words of a train command."""
    from mingpt_ddp.cli.recorded_preset import store_recorded  # imports Hydra

    return store_recorded(arguments[0], arguments[1:])
