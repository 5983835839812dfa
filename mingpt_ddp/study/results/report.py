"""Report a sweep or a run: a table for the terminal, and a page. This needs no torch."""

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
MAX_NAME = 100  # characters of the joined names of several directories
WATCH_S = 5.0  # interval in seconds at which the page of running jobs is written again
NO_PAGE = "the page needs plotly; pip install 'mingpt_ddp[report]'"


def page_path(directories: list[Path]) -> Path:
    """Return the path of the page for these directories.

    The page of several directories is named after them, so that other pages stay. It is written to
    the lowest directory that holds them all, or to the current one if that is not writable.
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
    """Return the table of the jobs, and write their page.

    The table does not depend on the page. Without plotly, its last line says how to install it. If
    the page cannot be written, the table is printed before the error is raised.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        page: HTML file to write.
        metric: As for `read_jobs`.
        accept_code: As for `read_results`.

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
    """Write the page every few seconds until no job runs or until Ctrl-C, then return `report`.

    The page reloads itself in a browser in the meantime. If no job has begun yet, wait for one.

    Raises:
        RunError: As for `report`, or plotly is missing.
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
    """Read the jobs. Return None until each directory has one."""
    return None if any(map(_is_awaited, directories)) else read_results(directories, metric)


def _is_awaited(directory: Path) -> bool:
    """Return True if a directory has no run yet or does not exist yet. A file is not awaited."""
    is_possible = directory.is_dir() or not os.path.lexists(directory)
    return is_possible and not find_runs(directory)


def write_page(results: Results, page: Path, reload_s: float = 0) -> None:
    """Write the page.

    Args:
        reload_s: Interval in seconds at which the page reloads itself. 0 disables reloading.
    """
    from mingpt_ddp.study.results.page.page import render_page

    title = ", ".join(directory.resolve().name for directory in results.directories)
    try:
        document = render_page(title, results, reload_s)
        atomic_write(page, document.encode(errors="replace"))
    except OSError as error:
        raise RunError(f"cannot write {page}: {reason(error)}") from error
