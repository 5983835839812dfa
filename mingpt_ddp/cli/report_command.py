"""Report a run, or the results of a sweep or of any runs.

    python -m mingpt_ddp.report outputs/NAME [outputs/OTHER ...] [format=text]

runs       directories: runs, or parents of runs one or two levels below
format     text, or json: print a JSON document instead of the table and the page

Prints a table of the jobs, best first, and writes a page of the curves of all jobs; or, if one run is named, of its
curves with restarts, timings of every rank, samples and configuration. The page of one directory is its report.html,
that of several is report-NAME+OTHER.html next to them. It needs plotly: pip install 'mingpt_ddp[report]'.

Jobs that differ in run.seed alone are replicates: one row with the mean, its 95% interval by Student's t (which needs
scipy, of the same extra), the standard deviation and the number of seeds. The best has the lowest mean.

The JSON document has "objective", "parameters", "notes", "importance" (share by parameter) and "groups", best first, each
with "name", "parameters", "n" (complete seeds), "mean", "deviation", "low" and "high" (the interval), and "jobs", each with
"name", "directory", "status", "seed" and "result" (every number of its result.json). Of a search with several objectives it
has "objectives" too, and each group "on_front". What is unknown or not finite is null.

Jobs with different tokenizers are ranked by bits per byte, all others by their validation loss.
"""  # noqa: E501

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.errors import RunError
from mingpt_ddp.sweeps.report_json import json_report
from mingpt_ddp.sweeps.results import read_results
from mingpt_ddp.sweeps.sweep_report import page_path, report


@dataclass(frozen=True)
class ReportConfig:
    """The keys of the command line, as the usage above describes them."""

    runs: list[str]
    format: Literal["text", "json"] = "text"


def main() -> None:
    """Run `python -m mingpt_ddp.report`."""
    run_command(__doc__, _command)


def _command(config: ReportConfig) -> int:
    for url in config.runs:
        if "://" in url:
            raise RunError(
                f"{url} is not a local directory; only snapshots may be remote, not run directories"
            )
    directories = [*{os.path.realpath(run): Path(run) for run in config.runs}.values()]
    if config.format == "json":
        print(json_report(read_results(directories)), flush=True)
    else:
        print(report(directories, page_path(directories)), flush=True)
    return 0
