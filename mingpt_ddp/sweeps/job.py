"""A job of a sweep: its number and label, its directory, and whether it has already ended."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.config import LIMITS, Config, flatten, named_keys, named_values
from mingpt_ddp.results.objective import Objective
from mingpt_ddp.storage.run_directory import (
    RunStatus,
    read_result,
    recorded_config,
    run_name,
)
from mingpt_ddp.storage.yaml_and_json import finite

# Exceptions from reading an untrusted record that no run has written.
NOT_OF_A_RUN = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError)


@dataclass(frozen=True)
class Job:
    """The identity of a job. Hydra's global state may describe another job in the meantime."""

    number: int  # from 0
    label: str  # its swept overrides

    @staticmethod
    def current() -> "Job":
        """Return the job that Hydra's state describes."""
        return Job(hydra_utils.job_number(), hydra_utils.job_label())


def look_up(
    config: Config, swept: dict[str, str], objective: Objective
) -> tuple[str, float | None]:
    """Return the run.name of a job, and its objective if the job is complete.

    Args:
        swept: Overrides that the sweep varies, by key.
    """
    name = job_name(config, swept)
    return name, _final_value(Path(config.run.root, name), config, objective)


def job_name(config: Config, swept: dict[str, str]) -> str:
    """Return the `run.name` of a job: the sweep's name, the readable overrides and a digest.

    The digest identifies the job. A directory whose name ends with it belongs to the job, even if
    an edit of the sweep has changed the readable part.
    """
    plain = config.to_dict()
    values = flatten(plain)
    covered = {*named_keys(plain), "model", "optimizer", "data"}  # including presets
    extra = {}
    for key, text in swept.items():
        if key not in covered:
            # Use the parsed value, because 100 and 1e2 are the same job.
            extra[key] = json.dumps(values.get(key, text))
    hashed = {"swept": extra} if extra else {}
    if config.run.name is None:
        return run_name(config, hashed)
    digest = config.digest(hashed)
    existing = sorted(Path(config.run.root, config.run.name).glob(f"*-{digest}"))
    if existing:
        return f"{config.run.name}/{existing[0].name}"
    return f"{config.run.name}/{_readable(swept)}-{digest}"


def _readable(swept: dict[str, str]) -> str:
    """Format overrides for the beginning of a directory's name."""
    text = ",".join(f"{key}={value}" for key, value in sorted(swept.items()))
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
    return safe.lstrip("._=,+-")[:100] or "job"


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
            # An old limit of null did not end the job. Another limit did.
            if old is not None and (new is None or new > old):
                return False
    except NOT_OF_A_RUN:
        return False
    return True


def _final_value(directory: Path, config: Config, objective: Objective) -> float | None:
    """Return the objective of a job that has ended for good with the same values, else None."""
    result = read_result(directory)
    recorded = recorded_config(directory) or {}
    if config.run.resume == "never" or not _has_ended(result, recorded, config):
        return None
    try:
        if named_values(recorded) != named_values(config.to_dict()):
            return None
        return None if finite(result["val_loss"]) is None else objective.value(result)
    except NOT_OF_A_RUN:
        return None
