"""Report a run, or the results of a sweep or of any runs.

    python -m mingpt_ddp report outputs/NAME [outputs/OTHER ...] [format=text]
    python -m mingpt_ddp report outputs/NAME [outputs/OTHER ...] compare [format=text]
    python -m mingpt_ddp report outputs/NAME [outputs/OTHER ...] watch

runs       directories: runs, or parents of runs one or two levels below; write ./compare for one of that name
compare    say which setting is better, by how much, and how sure that is, instead of the table and the page; add the verdict to
           outputs/experiments.jsonl
metric     a number of result.json that ranks the jobs, as metric=val_accuracy; lower is better, and with a minus,
           metric=-val_accuracy, higher
watch      write the page again every few seconds until no job runs any more, or until Ctrl-C; in a browser it reloads itself;
           before the first run it waits for it
format     text, or json: print a JSON document instead

Prints a table of the jobs, best first, and writes a page: the best one, whether it is better by more than chance, curves,
parameters and settings. The page of one run also has all measurements, samples and restarts. The page of one directory is its
report.html. The page of several directories is report-NAME+OTHER.html next to them. It needs plotly: pip install 'mingpt_ddp[report]'.

Jobs that differ in run.seed alone are replicates: one row with the mean, its 95% interval by Student's t, the standard
deviation and the number of seeds, the best mean first. If all rows with two seeds or more share at least three seeds, the best
row has the best mean over the shared seeds; otherwise it has the best mean over all of its seeds. Seeds that another version of
your files has trained are another row, unless you add accept_code=true (or a run had run.accept_code=true).
A seed has diverged if its loss is not finite. A row with a diverged seed has no mean, comes last, and is never the best.

The JSON document has "objective", "better" (lower or higher), "parameters", "notes" and "groups", best first, each with
"name", "parameters", "n" (complete seeds), "mean", "deviation", "low" and "high" (the interval), and "jobs", each with
"name", "directory", "status", "seed", "code" and "result" (every number of its result.json). What is unknown or not finite is null.

Without metric=, jobs are ranked by the sweep.metric of their sweep; else by their validation loss, or by bits per byte if
their tokenizers differ.

`compare` takes jobs that differ in run.seed alone as one setting, and compares the best setting with each other one:
how much better its mean is, with the 95% interval. If both settings share three seeds or more, and these are most of their
seeds, it compares seed by seed (paired t-test), else the means (Welch's). A verdict covers the tested seeds alone: seeds
without a pair are left out, and a note says so if the order of the table contradicts the verdict. With more than two settings p is corrected for all pairs (Holm). Needs two seeds of each (-m run.seed=1,2,3).
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
    check(len(words) < 2, f"{' and '.join(words)} do not go together; give one of them")
    check(runs, f"{''.join(words)} needs directories; name runs, or the directory of a sweep")
    for url in runs:
        if "://" in url:
            raise RunError(
                f"{url} is not a local directory; only snapshots may be remote, not run directories"
            )
    directories = [*{os.path.realpath(run): Path(run) for run in runs}.values()]
    as_json = config.format == "json"
    check(WATCH not in words or not as_json, f"{WATCH} writes a page; leave out format=json")
    if WATCH in words:
        raise_interrupts()  # they end the watch
        echo(watch(directories, page_path(directories), config.metric))
    elif COMPARE in words:
        echo(verdict(directories, as_json, config.metric, config.accept_code))
    elif as_json:
        echo(json_report(read_results(directories, config.metric, accept_code=config.accept_code)))
    else:
        page = page_path(directories)
        echo(report(directories, page, config.metric, accept_code=config.accept_code))
    return 0
