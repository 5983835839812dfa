"""Commands, one module each: arguments in, exit code out."""

import re
import sys

# mingpt_ddp.X runs X, and mingpt_ddp itself trains.
COMMANDS = ("train", "sample", "evaluate", "snapshots", "report", "plan", "again", "versions")


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
        from mingpt_ddp.config.retired import retired  # not at every start

        unknown = f"{module[1]} is not a command; use one of {', '.join(doors)}"
        line = retired(module[1].removeprefix("mingpt_ddp.")) or unknown
        print(f"config error: {line}", file=sys.stderr)
        sys.exit(2)
