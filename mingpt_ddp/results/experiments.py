"""The record of verdicts: each comparison of settings is a line of experiments.jsonl."""

import contextlib
import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from mingpt_ddp.errors import RunError, counted, printable, reason
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.results.formats import cut
from mingpt_ddp.results.objective import LOSS
from mingpt_ddp.results.runs import Job
from mingpt_ddp.storage.lines import read_lines
from mingpt_ddp.storage.storage import open_regular

EXPERIMENTS = "experiments.jsonl"  # in the directory of the runs
MAX_BYTES = 1 << 26
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # a link could lead to any file
LONGEST = 500  # characters of a verdict
WHEN = "%Y-%m-%dT%H:%M:%S%z"


def root_of(job: Job) -> Path:
    """Return the run.root of a job: outputs of outputs/sweep/job."""
    directory = job.directory.resolve()
    name = PurePosixPath(str(job.config.get("run.name"))).parts
    is_named = directory.parts[-len(name) :] == name
    return directory.parents[len(name) - 1 if is_named else 0]


def append(root: Path, experiment: dict[str, Any]) -> str | None:
    """Append a line in one write, as other processes may; return why it cannot be written.

    Where a line differs in its time alone, nothing is added: that comparison has been looked at.
    """
    when = time.strftime(WHEN)
    line = json.dumps({"when": when, **experiment}).encode() + b"\n"
    same = line[line.index(b", ") :].rstrip()
    try:
        with contextlib.suppress(FileNotFoundError):
            if any(each.endswith(same) for each in read_lines(root / EXPERIMENTS, MAX_BYTES)):
                return None
        with open_regular(root / EXPERIMENTS, FLAGS, "a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read(1) not in (b"", b"\n"):  # the disk was full
                line = b"\n" + line
            if os.write(file.fileno(), line) < len(line):
                raise OSError("the disk is full")
    except OSError as error:
        return f"cannot write {root / EXPERIMENTS}: {reason(error)}; the verdict is not recorded"
    return None


def experiments_table(root: Path) -> str:
    """Return a row for each verdict in the record, the oldest first.

    Raises:
        RunError: there is no record that can be read.
    """
    unread = 0
    rows = [["when (UTC)", "runs", "versions and overrides", "verdict"]]
    try:
        for line in read_lines(root / EXPERIMENTS, MAX_BYTES):
            try:
                rows += _rows(line)
            except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
                unread += bool(line.strip())
    except OSError as error:
        raise RunError(
            f"cannot read {root / EXPERIMENTS}: {reason(error)}; each compare adds a line to it"
        ) from error
    lines = table_lines(rows, left=(0, 1, 2, 3))
    if unread:
        lines.append(f"note: {counted(unread, 'line')} of {root / EXPERIMENTS} cannot be read")
    return printable("\n".join(lines))


def _rows(line: bytes) -> list[list[str]]:
    """Return the rows of a line.

    Raises:
        AttributeError, LookupError, TypeError, ValueError, RecursionError: it is no record.
    """
    record = json.loads(line)
    when = datetime.strptime(record["when"], WHEN).astimezone(timezone.utc)
    runs = cut(" ".join(map(str, record["runs"])))
    versions = [f"{name} = {code}" for name, code in record.get("versions", {}).items()]
    settings = "; ".join([*versions, *map(str, record.get("overrides", []))]) or "-"
    metric = record.get("objective", LOSS.series)
    better = record.get("better", "lower")
    by = "" if metric == LOSS.series else f"by {metric}, {better} is better: "
    rows = []
    for comparison in record["comparisons"]:
        verdict = by + str(comparison["sentence"]).replace("\n", "\\n")
        rows.append([f"{when:%Y-%m-%d %H:%M}", runs, cut(settings, LONGEST), cut(verdict, LONGEST)])
    return rows
