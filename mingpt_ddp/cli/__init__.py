"""The commands, such as `mingpt-ddp train`. Each has a module in `commands`."""

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
        advice = f"write python -m mingpt_ddp COMMAND; the commands are {names}"
        print(f"config error: {module} is not a command; {advice}", file=sys.stderr)
        sys.exit(2)
