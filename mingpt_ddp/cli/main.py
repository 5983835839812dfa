"""Train a small GPT, sample from it, and manage its snapshots.

    mingpt-ddp COMMAND [URL ...] [key=value ...]

train        train a model
sample       generate text from a snapshot
evaluate     measure the model of a snapshot on a split, or on other data
snapshots    list, verify, prune and export snapshots
report       show a sweep, or any runs, as a table and a page
plan         say what a configuration means, without training it
again        train with the configuration that a run has recorded, and with changes
versions     train two versions of the code, and say which is better, faster, or the same

`mingpt-ddp COMMAND --help` describes the keys of a command.
"""

import sys
from importlib import import_module

from mingpt_ddp.cli import COMMANDS
from mingpt_ddp.cli.arguments import run_command


def main() -> None:
    """Run the command named by the first argument with the remaining arguments."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        import_module(f"mingpt_ddp.cli.commands.{sys.argv.pop(1)}").main()
    else:
        run_command(__doc__, dict.fromkeys(COMMANDS, len))  # describes them, or refuses the name
