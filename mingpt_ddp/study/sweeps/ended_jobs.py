"""Find out from its directory if a job of a sweep has already ended."""

from typing import Any

from mingpt_ddp.config.config import LIMITS, Config, named_values
from mingpt_ddp.config.job import Job, RunStatus, existing_name
from mingpt_ddp.storage.run_directory import read_result, recorded_config
from mingpt_ddp.storage.yaml_and_json import finite
from mingpt_ddp.study.results.objective import Objective, objective_named
from mingpt_ddp.study.sweeps.kept_results import KeptResults
from mingpt_ddp.training.run_job import Known, Records

# Exceptions from reading an untrusted record that no run has written.
NOT_OF_A_RUN = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError)


class JobRecords(Records):
    """The records of jobs as their own directories have them. Any process can read these."""

    def __init__(self) -> None:
        self.kept = KeptResults()

    def look_up(self, job: Job) -> Known:
        job = job.with_run(name=existing_name(job))
        value = final_value(job, objective_named(job.config.sweep.metric))
        if value is not None:
            self.kept.check(job.directory, job.config)
        return Known(str(job.config.run.name), value)

    def value_of(self, job: Job) -> float:
        return objective_named(job.config.sweep.metric).value(read_result(job.directory))

    def pruner_callback(self, job: Job) -> None:
        return None

    def threads(self, workers: int, default: int) -> None:
        return None


def final_value(job: Job, objective: Objective) -> float | None:
    """Return the objective of a job that has ended for good with the same values, else None."""
    config = job.config
    result = read_result(job.directory)
    recorded = recorded_config(job.directory) or {}
    if config.run.resume == "never" or not _has_ended(result, recorded, config):
        return None
    try:
        if named_values(recorded) != named_values(config.to_dict()):
            return None
        return None if finite(result["val_loss"]) is None else objective.value(result)
    except NOT_OF_A_RUN:
        return None


def _has_ended(result: dict[str, Any], recorded: dict[str, Any], config: Config) -> bool:
    """Return True if a job is complete at the limits of `config`, or was pruned.

    Args:
        recorded: Configuration of the job's last start.
    """
    try:
        if result["status"] == RunStatus.PRUNED:  # larger limits do not continue a pruned job
            return True
        if result["status"] != RunStatus.COMPLETE:
            return False
        keys = [*LIMITS]
        if result.get("stopped_early"):
            keys.append("patience")
        for key in keys:
            old = recorded["trainer"].get(key)  # older runs lack max_minutes
            new = getattr(config.trainer, key)
            # A limit that was null did not end the job, but any other limit may have.
            if old is not None and (new is None or new > old):
                return False
    except NOT_OF_A_RUN:
        return False
    return True
