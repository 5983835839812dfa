"""Commands, one module each: arguments in, exit code out."""

import sys

from mingpt_ddp.interrupts import interrupt_commands, main_module

# mingpt_ddp.X runs X, and mingpt_ddp itself trains.
COMMANDS = ("train", "sample", "evaluate", "snapshots", "report", "plan", "again", "versions")


def begin() -> None:
    """Handle Ctrl-C before the imports that take time.

    Exit with code 2 if `python -m` is about to run a module that is not a command.
    """
    interrupt_commands()
    module = main_module()
    doors = [f"mingpt_ddp.{name}".removesuffix(".train") for name in COMMANDS]
    if module and module.removesuffix(".__main__") not in doors:
        line = f"{module} is not a command; use one of {', '.join(doors)}"
        print(f"config error: {line}", file=sys.stderr)
        sys.exit(2)
