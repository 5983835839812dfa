"""The signals that end a command, and Ctrl-C while the command is still importing its libraries.

This module is imported before everything else, so it imports nothing that takes time.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

# A scheduler sends the first two, Ctrl-C the third, and a terminal that is closed the last one.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT  # exit code after Ctrl-C
CHECKOUT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
# Commands of this package that are scripts in a checkout.
SCRIPTS = ("main.py", "sample.py", "mingpt_ddp/study/versions/version_job.py")


def handle(handler: Callable[[int, Any], Any]) -> dict[signal.Signals, Any]:
    """Handle SIGNALS, except those that are ignored, as nohup ignores SIGHUP.

    Only the main thread may call this.

    Returns:
        The previous handlers, by signal.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, handler)
    return handled


def interrupt_commands(clean_up: Callable[[], None] = lambda: None) -> None:
    """Let Ctrl-C end this process with one line if it runs a command of this package.

    Python would raise KeyboardInterrupt instead, and a library that is interrupted in an import may
    turn that into another error. A run replaces this handler. A command that must clean up calls
    `raise_interrupts`. A user's script keeps Python's handler.

    Args:
        clean_up: Called before the process exits.
    """

    def exit_interrupted(number: int, frame: Any) -> None:
        try:
            clean_up()
            os.write(2, b"interrupted\n")
        finally:  # even if there is no standard error
            os._exit(INTERRUPTED)

    if is_command() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, exit_interrupted)


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt at each of SIGNALS, so that `finally` blocks clean up."""
    handle(signal.default_int_handler)


def main_module() -> str | None:
    """Return the module that `python -m` is about to run, while it imports the parent packages.

    The arguments are then sys.argv[1:]. The word before them in sys.orig_argv is the module's name,
    or -mNAME. Return None if `python -m` is not resolving a module of this package.
    """
    if sys.argv[:1] != ["-m"]:
        return None
    module = re.fullmatch(r"(?:-\w*?m)?(mingpt_ddp(?:\..*)?)", sys.orig_argv[-len(sys.argv)])
    return module[1] if module else None


def is_command() -> bool:
    """Return True if the main program is a command of this package."""
    program = sys.argv[0] if sys.argv else ""
    if os.path.basename(program) == "mingpt-ddp" or main_module():
        return True
    return os.path.realpath(program) in [os.path.join(CHECKOUT, name) for name in SCRIPTS]
