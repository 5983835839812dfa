"""Report jobs to other programs: as a JSON document, or as a flat row for each job."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mingpt_ddp.study.results.formats import MAX_LENGTH, cut
from mingpt_ddp.study.results.groups import SEED, Group, replicates
from mingpt_ddp.study.results.results import Results, read_with_failures
from mingpt_ddp.study.results.runs import RunRecord, number, varying


def json_report(results: Results) -> str:
    """Return the report as strict JSON in ASCII. Numbers that are not finite become null."""
    document = {
        "objective": results.objective.key,
        "better": results.objective.better,
        "parameters": results.keys,
        "notes": [*results.notes, *results.unread],
        "groups": [_group(group, results.keys) for group in results.groups],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def job_rows(directories: Sequence[Path], metric: str | None = None) -> list[dict[str, Any]]:
    """Return a flat row for each job, with its results and the parameters that differ between jobs.

    All rows have the same keys. Replicates follow each other, and the setting with the best mean
    comes first.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        metric: The objective (see `read_jobs`).
    """
    found, _ = read_with_failures(directories, metric)
    jobs = [job for group in replicates(found) for job in group.jobs]
    parameters = [key for key in varying(jobs) if key != SEED]
    rows = []
    for job in jobs:
        row = _job(job)
        numbers = row.pop("result")
        row |= {key: job.config.get(key) for key in parameters}
        row |= {"step": job.step, "val_loss": job.val_loss}
        rows.append(row | numbers | row)
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def _group(group: Group, keys: list[str]) -> dict[str, Any]:
    return {
        "name": group.name,
        "parameters": {key: group.config[key] for key in keys if key in group.config},
        **asdict(group.estimate),
        "jobs": [_job(job) for job in group.jobs],
    }


def _job(job: RunRecord) -> dict[str, Any]:
    result = {}
    for key, value in job.result.items():
        if type(value) in (int, float):
            result[cut(str(key), MAX_LENGTH)] = value if number(value) is not None else None
    return {
        "name": job.name,
        "directory": str(job.directory),
        "status": job.status,
        "seed": job.config.get(SEED),
        "code": job.code or None,
        "result": result,
    }
