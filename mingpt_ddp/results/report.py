"""The report of a sweep or a run: a table for the terminal and a page; without torch."""

import hashlib
import os
import re
from pathlib import Path

from mingpt_ddp.distributed.exit import echo
from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.results.results import read_results
from mingpt_ddp.results.text import table
from mingpt_ddp.storage.storage import atomic_write

PAGE = "report.html"
MAX_NAME = 100  # characters of the names of several directories


def page_path(directories: list[Path]) -> Path:
    """Return the path of the page of a directory, or of several.

    That of several has their names, so that the pages of others stay. It is in the lowest
    directory that holds them all; in the current one if that is not writable.
    """
    if len(directories) == 1:
        return directories[0] / PAGE
    found = [os.path.realpath(directory) for directory in directories]
    above = os.path.commonpath(found)
    parts = []
    for path in found:
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


def report(directories: list[Path], page: Path) -> str:
    """Return the table of the jobs, and write their page, or the page of the one run.

    The table does not depend on the page: without plotly its last line says how to install it, and
    if the page cannot be written the table is printed before the error is raised.

    Args:
        directories: runs, or parents of runs one or two levels below.
        page: the HTML file to write.

    Raises:
        RunError: one of the directories holds no run, or the page cannot be written.
    """
    results = read_results(directories)
    first = results.jobs[0]
    is_run = directories == [first.directory]
    text = table(results, is_run)
    try:
        from mingpt_ddp.results.page import render_page
        from mingpt_ddp.results.run_page import render_run
    except ImportError:
        return f"{text}\nthe page needs plotly; pip install 'mingpt_ddp[report]'"
    try:
        title = ", ".join(directory.resolve().name for directory in directories)
        document = render_run(title, first) if is_run else render_page(title, results)
        atomic_write(page, document.encode(errors="replace"))
    except OSError as error:
        echo(text)
        raise RunError(f"cannot write {page}: {reason(error)}") from error
    return f"{text}\nthe page is {page}"
