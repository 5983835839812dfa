"""Train a small GPT, and use what was trained.

    mingpt-ddp COMMAND [URL ...] [key=value ...]

train      train, as main.py does in a checkout
sample     generate text from a snapshot
snapshots  list, verify, prune and export snapshots
report     show a sweep, or any runs, as a table and a page

`mingpt-ddp COMMAND --help` describes the keys of a command.
"""

import sys
from importlib import import_module

from mingpt_ddp.cli import COMMANDS
from mingpt_ddp.cli.arguments import run_command


def main() -> None:
    """Run the command that the first word names, with the words behind it."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        import_module(f"mingpt_ddp.cli.{sys.argv.pop(1)}").main()
    else:
        run_command(__doc__, dict.fromkeys(COMMANDS, len))  # it refuses the word
