"""Report a sweep or a run as a table for the terminal and a page. This module needs no torch."""

import hashlib
import os
import re
import time
from pathlib import Path

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.storage.storage import atomic_write
from mingpt_ddp.study.results.report_text import table
from mingpt_ddp.study.results.results import Results, read_results
from mingpt_ddp.study.results.runs import find_runs

PAGE = "report.html"
MAX_NAME = 100  # longest part of the page's name that lists the directories, in characters
WATCH_S = 5.0  # seconds until the page of running jobs is written again
NO_PAGE = "the page needs plotly; pip install 'mingpt_ddp[report]'"


def page_path(directories: list[Path]) -> Path:
    """Choose the path of the page for these directories.

    The page of several directories is named after all of them, so that it does not replace the page
    of other directories. It is written to the lowest directory that contains all of them, or to the
    current directory if that one is not writable.
    """
    if len(directories) == 1:
        return directories[0] / PAGE
    paths = [os.path.realpath(directory) for directory in directories]
    above = os.path.commonpath(paths)
    parts = []
    for path in paths:
        parts.append(os.path.basename(path) if path == above else os.path.relpath(path, above))
    names = "+".join(parts)
    readable = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", names)
    if len(readable) > MAX_NAME:
        digest = hashlib.sha256(os.fsencode(names)).hexdigest()[:8]
        readable = f"{readable[:MAX_NAME]}-{digest}"
    parent = Path(above)
    if parent.is_relative_to(Path.cwd()):
        parent = Path(os.path.relpath(above))
    if not os.access(parent, os.W_OK):
        parent = Path()
    return parent / f"report-{readable}.html"


def report(
    directories: list[Path],
    page: Path,
    metric: str | None = None,
    accept_code: bool = False,
) -> str:
    """Return the table of the jobs as text, and write their page.

    The table does not depend on the page. Without plotly, the last line of the table says how to
    install plotly. If the page cannot be written, the table is printed before the error is raised.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        page: HTML file to write.
        metric: The objective (see `read_jobs`).
        accept_code: Group results together even if the user's code has changed between them.

    Raises:
        RunError: One of the directories holds no run, no run has the metric, or the page cannot be
            written.
    """
    results = read_results(directories, metric, accept_code)
    is_run = directories == [results.jobs[0].directory]
    text = table(results, is_run)
    try:
        write_page(results, page)
    except ImportError:
        return f"{text}\n{NO_PAGE}"
    except RunError:
        echo(text)
        raise
    return f"{text}\nthe page is {page}"


def watch(directories: list[Path], page: Path, metric: str | None = None) -> str:
    """Write the page every few seconds until no job runs, or until Ctrl-C. Then return the report.

    Meanwhile the page reloads itself in the browser. If a directory has no run yet, wait for one.

    Raises:
        RunError: As for `report`, or because plotly is missing.
    """
    line = f"the page {page} follows the jobs until they end, or until Ctrl-C"
    for each in filter(_is_awaited, directories):
        line += f"; it waits for the first run in {each}"
    try:
        while (results := _read_begun(directories, metric)) is None or results.is_running:
            began = time.monotonic()
            if results is not None:
                write_page(results, page, WATCH_S)
            if line:
                echo(line)
            line = ""
            time.sleep(max(WATCH_S, 4 * (time.monotonic() - began)))
    except ImportError as error:
        raise RunError(NO_PAGE) from error
    except KeyboardInterrupt:
        pass
    return report(directories, page, metric)


def _read_begun(directories: list[Path], metric: str | None) -> Results | None:
    """Read the jobs. Return None until each directory has a job."""
    return None if any(map(_is_awaited, directories)) else read_results(directories, metric)


def _is_awaited(directory: Path) -> bool:
    """Return True if a directory has no run yet, or does not exist yet. Return False for a file."""
    is_possible = directory.is_dir() or not os.path.lexists(directory)
    return is_possible and not find_runs(directory)


def write_page(results: Results, page: Path, reload_s: float = 0) -> None:
    """Write the page of a report.

    Args:
        results: The jobs to show.
        page: HTML file to write.
        reload_s: Interval in seconds at which the page reloads itself. 0 disables reloading.
    """
    from mingpt_ddp.study.results.page.page import render_page

    title = ", ".join(directory.resolve().name for directory in results.directories)
    try:
        document = render_page(title, results, reload_s)
        atomic_write(page, document.encode(errors="replace"))
    except OSError as error:
        raise RunError(f"cannot write {page}: {reason(error)}") from error
