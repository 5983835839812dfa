"""The report of a sweep: a table for the terminal and a page for the browser, without torch."""

from __future__ import annotations

from pathlib import Path

from mingpt_ddp.errors import RunError
from mingpt_ddp.storage.storage import atomic_write
from mingpt_ddp.sweeps.page import page as page_of
from mingpt_ddp.sweeps.runs import read_jobs, varying
from mingpt_ddp.sweeps.table import table

PAGE = "report.html"
MOST = 3  # directories that are in the title


def report(directories: list[Path], page: Path | None) -> str:
    """The table of the jobs in `directories`, and the page where one is wanted.

    The table is not lost with the page: if that cannot be written, it is printed before the error is raised.

    Args:
        directories: runs, or directories that hold runs one or two levels below.
        page: the HTML file to write.

    Raises:
        RunError: there is no run in one of the directories, or the page cannot be written.
    """
    jobs = read_jobs(directories)
    keys = varying(jobs)
    text = table(jobs, keys)
    if page is not None:
        names = [directory.resolve().name for directory in directories]
        title = ", ".join(names) if len(names) <= MOST else f"{', '.join(names[:MOST])} and {len(names) - MOST} more"
        try:
            atomic_write(page, page_of(title, jobs, keys).encode())
        except OSError as error:
            print(text, flush=True)
            raise RunError(f"cannot write {page}: {error.strerror}") from error
    return text
