"""The commands. Each has a module in `commands`, which reads arguments and returns an exit code."""

import sys

from mingpt_ddp.process.interrupts import interrupt_commands, main_module

COMMANDS = (
    "train",
    "sample",
    "evaluate",
    "snapshots",
    "report",
    "plan",
    "again",
    "replay",
    "at",
    "versions",
)


def begin() -> None:
    """Handle Ctrl-C before the imports that take time.

    Exit with code 2 if `python -m` names a module inside this package. Only `python -m mingpt_ddp`
    is a command.
    """
    interrupt_commands()
    module = main_module()
    if module and module.removesuffix(".__main__") != "mingpt_ddp":
        names = ", ".join(COMMANDS)
        line = f"{module} is not a command; write python -m mingpt_ddp COMMAND, one of {names}"
        print(f"config error: {line}", file=sys.stderr)
        sys.exit(2)
