"""See what came out of a sweep, or of any runs.

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
    """The entry point of `python -m mingpt_ddp.report`."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return
    with cli_errors():
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        _report(words)


def _report(words: list[str]) -> None:
    for word in words:
        if word.startswith("-"):
            raise RunError(f"{word} is not an option; name the directories of runs")
        if "://" in word:
            raise RunError(
                f"{word} is not a local directory; the runs' directories are local, only snapshots may not be"
            )
    from mingpt_ddp.sweeps.report import PAGE, report

    directories = [Path(word) for word in words]
    page = directories[0] / PAGE
    print(report(directories, page))
    print(f"the page is {page}")


if __name__ == "__main__":
    main()
