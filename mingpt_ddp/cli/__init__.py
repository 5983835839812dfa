"""Commands, one module each: arguments in, exit code out."""

import re
import sys

# mingpt_ddp.X runs X, and mingpt_ddp itself trains.
COMMANDS = ("train", "sample", "evaluate", "snapshots", "report", "plan", "collectives", "again")


def refuse_other_modules() -> None:
    """Exit with code 2 if `python -m` is about to run a module that is not a command.

    Call it while `python -m` imports the parent packages: the arguments are then sys.argv[1:], and
    the one before them in sys.orig_argv is the module's name, or -mNAME.
    """
    if sys.argv[:1] != ["-m"]:  # `python -m` is not resolving its module
        return
    module = re.fullmatch(r"(?:-\w*?m)?(mingpt_ddp(?:\..*)?)", sys.orig_argv[-len(sys.argv)])
    doors = [f"mingpt_ddp.{name}".removesuffix(".train") for name in COMMANDS]
    if module and module[1].removesuffix(".__main__") not in doors:
        print(
            f"config error: {module[1]} is not a command; use one of {', '.join(doors)}",
            file=sys.stderr,
        )
        sys.exit(2)
