"""Train a small GPT, sample from it, and manage its snapshots.

    mingpt-ddp COMMAND [URL ...] [key=value ...]

train        train a model
sample       generate text from a snapshot
evaluate     measure the model of a snapshot on a split, or on other data
snapshots    list, verify, prune and export snapshots
report       show the results of runs or of a sweep as a table and an HTML page
plan         show the length, the memory and the doubtful settings of a run, without training it
again        train with the recorded configuration of a run, changed by keys on the command line
replay       train some steps of a run again, and compare the results with the recorded ones
at           repeat one training step of a run, and show the text that it trained on
versions     train two or more versions of the code, and compare their losses and speeds

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
        trains_by_default: Train if the first argument does not look like the name of a command.
    """
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        name = sys.argv.pop(1)
    elif trains_by_default and not (words and re.fullmatch(r"[a-z_]+", words[0])):
        name = "train"
    else:
        # This prints the usage above, or refuses the name. It calls no command.
        run_command(__doc__, dict.fromkeys(COMMANDS, len))
        return
    import_module(f"mingpt_ddp.cli.commands.{name}").main()
