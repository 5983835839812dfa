"""Report a run, or the results of a sweep or of any runs.

    python -m mingpt_ddp.report outputs/NAME [outputs/OTHER ...]

runs       directories: runs, or parents of runs one or two levels below

Prints a table of the jobs, best first, and writes a page of the curves of all jobs; or, if one run is named, of its
curves with restarts, timings of every rank, samples and configuration. The page of one directory is its report.html,
that of several is report-NAME+OTHER.html next to them. It needs plotly: pip install 'mingpt_ddp[report]'.

Jobs with different tokenizers are ranked by bits per byte, all others by their validation loss.
"""  # noqa: E501

import os
from dataclasses import dataclass
from pathlib import Path

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.errors import RunError
from mingpt_ddp.sweeps.sweep_report import page_path, report


@dataclass(frozen=True)
class ReportConfig:
    """The keys of the command line, as the usage above describes them."""

    runs: list[str]


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
    print(report(directories, page_path(directories)), flush=True)
    return 0
