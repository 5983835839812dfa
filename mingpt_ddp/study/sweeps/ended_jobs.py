"""Find out if a job of a sweep has already ended, from its directory."""

from mingpt_ddp.config.config import values_in_name
from mingpt_ddp.config.job import Job, existing_name
from mingpt_ddp.storage.run_directory import (
    INVALID_RECORD_ERRORS,
    has_ended,
    read_result,
    recorded_config,
)
from mingpt_ddp.storage.yaml_and_json import finite
from mingpt_ddp.study.results.objective import Objective, objective_named
from mingpt_ddp.study.sweeps.kept_results import KeptResults
from mingpt_ddp.training.run_job import JobRecord, Records


class JobRecords(Records):
    """Looks up jobs in their own directories, which any process can read."""

    def __init__(self) -> None:
        self.kept_results = KeptResults()

    def look_up(self, job: Job) -> JobRecord:
        job = job.with_run(name=existing_name(job))
        value = final_value(job, objective_named(job.config.sweep.metric))
        if value is not None:
            self.kept_results.check(job.directory, job.config)
        return JobRecord(str(job.config.run.name), value)

    def value_of(self, job: Job) -> float:
        return objective_named(job.config.sweep.metric).value(read_result(job.directory))

    def pruner_callback(self, job: Job) -> None:
        return None

    def threads(self, workers: int, default: int) -> None:
        return None


def final_value(job: Job, objective: Objective) -> float | None:
    """Return the objective of a job that has ended for good. Return None for other jobs.

    A job counts only if its recorded configuration has the same values as its present one.
    """
    config = job.config
    result = read_result(job.directory)
    recorded = recorded_config(job.directory) or {}
    if config.run.resume == "never" or not has_ended(result, recorded, config):
        return None
    try:
        if values_in_name(recorded) != values_in_name(config.to_dict()):
            return None
        return None if finite(result["val_loss"]) is None else objective.value(result)
    except INVALID_RECORD_ERRORS:
        return None
