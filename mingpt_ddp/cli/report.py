"""Show what came out of a sweep, or of any runs.

    python -m mingpt_ddp.report outputs/NAME [outputs/OTHER ...]

Prints a table of the jobs, the best first, and writes a page with their curves to report.html in the first directory.
Each directory is a run, or holds runs one or two levels below. Jobs that are not complete are shown as far as they got.
"""

from pathlib import Path

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.errors import RunError
from mingpt_ddp.sweeps.report import PAGE, report


def main() -> None:
    """The entry point of `python -m mingpt_ddp.report`."""
    run_command(__doc__, _command)


def _command(words: list[str]) -> int:
    for word in words:
        if word.startswith("-"):
            raise RunError(f"{word} is not an option; name the directories of runs")
        refuse_credentials("URL", word)
        if "://" in word:
            raise RunError(f"{word} is not a local directory; only snapshots may be elsewhere, not runs' directories")
    directories = [Path(word) for word in words]
    print(report(directories, directories[0] / PAGE))
    return 0
