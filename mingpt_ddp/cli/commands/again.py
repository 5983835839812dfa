"""Train again with the recorded configuration of a run. Keys on the command line change it.

    python -m mingpt_ddp again outputs/demo optimizer.lr=3e-4

RUN         a local run directory; its config.yaml is used, even if presets have changed since
key=value   a change; presets and options of Hydra work as for training

If a change concerns a key that is part of a run's name (docs/configuration.md), a new run starts in a new directory. It is
named like any unnamed run, or by run.name=NAME. Otherwise the recorded run itself continues, for example up to a larger
trainer.max_steps.

The recorded configuration must not decide which programs run, or where files are sent. The paths of your Python files (code)
and the destinations of snapshots and logs are therefore not taken from it: give them on the command line. If the run needs
your code and you have not named it, the command stops and says which file it needs.
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
    """Turn the arguments (a run directory, then changes) into the words of a train command."""
    from mingpt_ddp.cli.recorded_preset import store_recorded  # imports Hydra

    return store_recorded(arguments[0], arguments[1:])
