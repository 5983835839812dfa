"""Record each comparison of settings as a line in experiments.jsonl."""

import json
import time
from pathlib import Path, PurePosixPath
from typing import Any

from mingpt_ddp.errors import reason
from mingpt_ddp.process.terminal import echo_error
from mingpt_ddp.storage.lines import append_line
from mingpt_ddp.study.results.runs import RunRecord

EXPERIMENTS = "experiments.jsonl"  # file name in the run.root of the compared runs
MAX_BYTES = 1 << 26  # size limit of the file


def root_of(job: RunRecord) -> Path:
    """Find the run.root of a job. For a job in outputs/sweep/job it is `outputs`."""
    directory = job.directory.resolve()
    name = PurePosixPath(str(job.config.get("run.name"))).parts
    is_named = directory.parts[-len(name) :] == name
    return directory.parents[len(name) - 1 if is_named else 0]


def record(root: Path, experiment: dict[str, Any]) -> None:
    """Append a comparison to experiments.jsonl. If the write fails, print a note."""
    line = json.dumps({"when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **experiment})
    try:
        append_line(root / EXPERIMENTS, line.encode() + b"\n", MAX_BYTES)
    except OSError as error:
        why = f"cannot write {root / EXPERIMENTS}: {reason(error)}"
        echo_error(f"note: {why}; the verdict is not recorded")
