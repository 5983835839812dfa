"""Show what came out of a sweep, or of any runs.

    python -m mingpt_ddp.report outputs/NAME [outputs/OTHER ...]

Prints a table of the jobs, the best first, and writes a page with their curves to report.html in the first directory.
Each directory is a run, or holds runs one or two levels below. Jobs that are not complete are shown as far as they got.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mingpt_ddp.distributed.exit import cli_errors
from mingpt_ddp.errors import RunError


def main() -> None:
    """Run `python -m mingpt_ddp.report`."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return
    with cli_errors():
        from mingpt_ddp.sweeps.report import PAGE, report

        for word in words:
            if word.startswith("-"):
                raise RunError(f"{word} is not an option; name the directories of runs")
            if "://" in word:
                raise RunError(
                    f"{word} is not a local directory; only snapshots may be elsewhere, not the runs' directories"
                )
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        directories = [Path(word) for word in words]
        print(report(directories, directories[0] / PAGE))
