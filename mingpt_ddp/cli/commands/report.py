"""Show the results of runs or of a sweep as a table and an HTML page.

    python -m mingpt_ddp report outputs/NAME [outputs/OTHER ...] [format=text]
    python -m mingpt_ddp report outputs/NAME [outputs/OTHER ...] compare [format=text]
    python -m mingpt_ddp report outputs/NAME [outputs/OTHER ...] watch

runs       run directories, or directories with runs one or two levels below them; write ./compare for a directory of this name
compare    print which setting is better, by how much, and how certain this is, instead of the table and the page; also add the
           verdict to outputs/experiments.jsonl
metric     the number in result.json that ranks the jobs: metric=val_loss if lower is better, metric=-val_accuracy if higher is
watch      write the page again every few seconds until all jobs have ended, or until Ctrl-C; the page reloads itself in a browser;
           if there is no run yet, the command waits for one
format     text (the default), or json to print a JSON document instead

Prints a table of the jobs, best first, and writes a page with the best job, the certainty that it is the best, curves,
parameters and settings. The page of a single run also has all measurements, samples and restarts. For one directory the page
is report.html in it. For several directories it is report-NAME+OTHER.html next to them. The page needs plotly:
pip install 'mingpt_ddp[report]'.

Jobs with equal settings but different run.seed are replicates. They share a row, with the mean, its 95% interval (Student's t), the
standard deviation and the number of seeds. The best mean comes first. If all rows with two or more seeds share at least three
seeds, the means of the shared seeds decide which row is the best; otherwise the means of all seeds decide. Jobs that another
version of your Python files has trained have their own row, unless you add accept_code=true (or run.accept_code=true was set in a
run). A seed has diverged if its loss is not finite. A row with a diverged seed has no mean, comes last, and is never the best.

The JSON document has "objective", "better" (lower or higher), "parameters", "notes" and "groups", best first. Each group has
"name", "parameters", "n" (complete seeds), "mean", "deviation", "low" and "high" (the interval), and "jobs". Each job has
"name", "directory", "status", "seed", "code" and "result" (all numbers of its result.json). Unknown and non-finite values are null.

Without metric=, the sweep.metric of the sweep ranks the jobs. If it is not set, the validation loss does, or bits per byte if
the tokenizers differ.

`compare` treats jobs with equal settings but different run.seed as one setting. It compares the best setting with each other
setting, and prints the difference of their means with its 95% interval. If two settings share three or more seeds, and these are
most of their seeds, it compares them seed by seed (paired t-test); otherwise it compares the means (Welch's t-test). A verdict
covers only the tested seeds. A paired test leaves out seeds without a pair; if the table then shows another order than the
verdict, a note says so. With more than two settings, p is corrected for all pairs (Holm). Each setting needs two seeds
(-m run.seed=1,2,3).
"""  # noqa: E501

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.study.results.analysis.verdict import verdict
from mingpt_ddp.study.results.report import page_path, report, watch
from mingpt_ddp.study.results.report_json import json_report
from mingpt_ddp.study.results.results import read_results

COMPARE = "compare"
WATCH = "watch"


@dataclass(frozen=True)
class ReportConfig:
    """The keys of the command line, as the usage above describes them."""

    runs: list[str]
    format: Literal["text", "json"] = "text"
    metric: str | None = None
    accept_code: bool = False


def main() -> None:
    """Run `python -m mingpt_ddp report`."""
    run_command(__doc__, _command)


def _command(config: ReportConfig) -> int:
    runs = [run for run in config.runs if run not in (COMPARE, WATCH)]
    words = [run for run in config.runs if run not in runs]
    check(len(words) < 2, f"{' and '.join(words)} cannot be combined; choose one of them")
    check(runs, f"{''.join(words)} needs a directory; name a run or the directory of a sweep")
    for url in runs:
        if "://" in url:
            raise RunError(
                f"{url} is not a local directory; copy the run directory to this machine (only "
                "snapshots may be remote)"
            )
    directories = [*{os.path.realpath(run): Path(run) for run in runs}.values()]
    as_json = config.format == "json"
    check(WATCH not in words or not as_json, f"{WATCH} writes a page; leave out format=json")
    if WATCH in words:
        raise_interrupts()  # so that Ctrl-C ends the watch
        echo(watch(directories, page_path(directories), config.metric))
    elif COMPARE in words:
        echo(verdict(directories, as_json, config.metric, config.accept_code))
    elif as_json:
        echo(json_report(read_results(directories, config.metric, accept_code=config.accept_code)))
    else:
        page = page_path(directories)
        echo(report(directories, page, config.metric, accept_code=config.accept_code))
    return 0
