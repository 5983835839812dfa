"""See what came out of a sweep, or of any runs.

    python -m mingpt_ddp.report outputs/NAME [outputs/OTHER ...]

Prints a table of the jobs, the best first, and writes a page with their curves to report.html in the first directory.
Each directory is a run, or holds runs one or two levels below. Jobs that are not complete are shown as far as they got.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mingpt_ddp.errors import RunError, UserError, printable

USER_ERROR = 2  # exit code
LONGEST_LINE = 1000  # characters of an error, part of which a stranger may have written


def main() -> None:
    """The entry point of `python -m mingpt_ddp.report`."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        _report(words)
    except BrokenPipeError:  # the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        _leave(str(error))
    except OSError as error:
        _leave(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def _report(words: list[str]) -> None:
    for word in words:
        if word.startswith("-"):
            raise RunError(f"{word} is not an option; name the directories of runs")
        if "://" in word:
            raise RunError(
                f"{word} is not a local directory; the runs' directories are local, only snapshots may not be"
            )
    from mingpt_ddp.report import PAGE, report

    directories = [Path(word) for word in words]
    page = directories[0] / PAGE
    print(report(directories, page))
    print(f"the page is {page}")


def _leave(message: str) -> None:
    print(printable(message)[:LONGEST_LINE], file=sys.stderr)
    sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
