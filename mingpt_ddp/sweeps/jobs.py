"""The jobs of a sweep: their directories, and whether they are complete."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import LIMITS, Config, flatten, named_keys, named_values
from mingpt_ddp.results.objective import Objective
from mingpt_ddp.storage.records import finite
from mingpt_ddp.storage.run_dir import (
    RunStatus,
    read_result,
    recorded_config,
    run_directory,
    run_name,
    with_run_name,
)


def look_up(
    config: Config, swept: dict[str, str], objective: Objective
) -> tuple[str, float | None]:
    """Return the run.name of a job, and its objective if it is complete.

    Args:
        swept: the overrides that the sweep varies, by key.
    """
    name = job_name(config, swept)
    return name, _final_value(run_directory(with_run_name(config, name)), config, objective)


def job_name(config: Config, swept: dict[str, str]) -> str:
    """Return the `run.name` of a job: the sweep's name, the readable overrides and a digest.

    The digest identifies the job: a directory that ends with it is the job's, even if an edit of
    the sweep has changed the readable part.
    """
    plain = config.to_dict()
    values = flatten(plain)
    covered = {*named_keys(plain), "model", "optimizer", "data"}  # including presets
    extra = {}
    for key, text in swept.items():
        if key not in covered:
            # the parsed value, not its spelling: 100 and 1e2 are the same job
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
    """Return overrides as the beginning of a directory's name."""
    text = ",".join(f"{key}={value}" for key, value in sorted(swept.items()))
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
    return safe.lstrip("._=,+-")[:100] or "job"


def has_ended_at(directory: Path, limits: Mapping[str, Any]) -> bool:
    """Return whether a complete job has reached these limits, as its own directory says."""
    result = read_result(directory)
    recorded = recorded_config(directory) or {}
    try:
        is_complete = result["status"] == RunStatus.COMPLETE
        return bool(is_complete and _has_reached_limits(result, recorded, limits))
    except (KeyError, TypeError, AttributeError):  # not written by a run
        return False


def limits_of(config: Config) -> dict[str, Any]:
    """Return what ends a job, by key of `trainer`."""
    return {key: getattr(config.trainer, key) for key in (*LIMITS, "patience")}


def _final_value(directory: Path, config: Config, objective: Objective) -> float | None:
    """Return the objective of a job that has reached the limits of `config`, else None."""
    if config.run.resume == "never":
        return None
    result = read_result(directory)
    recorded = recorded_config(directory) or {}
    try:
        if not _has_ended(result, config):
            return None
        is_pruned = result["status"] == RunStatus.PRUNED  # whatever the limits
        if not is_pruned and not _has_reached_limits(result, recorded, limits_of(config)):
            return None
        if named_values(recorded) != named_values(config.to_dict()):
            return None
        return None if finite(result["val_loss"]) is None else objective.value(result)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        # not written by a run
        return None


def _has_ended(result: dict[str, Any], config: Config) -> bool:
    """Return whether a job is complete, or was pruned by a rule that still holds."""
    if result.get("status") == RunStatus.PRUNED:
        return config.sweep.pruner != "none"
    return bool(result.get("status") == RunStatus.COMPLETE)


def _has_reached_limits(
    result: dict[str, Any], recorded: dict[str, Any], limits: Mapping[str, Any]
) -> bool:
    """Return whether none of the limits is larger than those that a job has reached.

    Args:
        recorded: the configuration of the job's last start.
    """
    keys = [*LIMITS]
    if result.get("stopped_early"):
        keys.append("patience")
    for key in keys:
        old = recorded["trainer"].get(key)  # older runs lack max_minutes
        new = limits[key]
        # an old limit of null did not apply: another one was reached
        is_reached = old is None or (new is not None and new <= old)
        if not is_reached:
            return False
    return True
