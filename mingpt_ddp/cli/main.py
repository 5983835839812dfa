"""Train a small GPT, sample from it, and manage its snapshots.

    mingpt-ddp COMMAND [URL ...] [key=value ...]

train        train a model
sample       generate text from a snapshot
evaluate     measure the model of a snapshot on a split, or on other data
snapshots    list, verify, prune and export snapshots
report       show a sweep, or any runs, as a table and a page
plan         say what a configuration means, without training it
again        train with the configuration that a run has recorded, and with changes
replay       train some steps of a run again, and compare them with what it has recorded
at           repeat a step of a run, and say which text it learnt from
versions     train two versions of the code, and say which is better, faster, or the same

`mingpt-ddp COMMAND --help` describes the keys of a command.
"""

import re
import sys
from importlib import import_module

from mingpt_ddp.cli import COMMANDS
from mingpt_ddp.cli.arguments import run_command


def main(trains_by_default: bool = False) -> None:
    """Run the command that the first argument names, with the other arguments.

    Args:
        trains_by_default: Train if the first argument is not a word such as `report`.
    """
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        name = sys.argv.pop(1)
    elif trains_by_default and not (words and re.fullmatch(r"[a-z_]+", words[0])):
        name = "train"
    else:
        run_command(__doc__, dict.fromkeys(COMMANDS, len))  # describes them, or refuses the name
        return
    import_module(f"mingpt_ddp.cli.commands.{name}").main()
