"""The jobs of a sweep: what each is called, and whether it is done."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TypeAlias

from mingpt_ddp.config.config import LIMITS, Config, hashed_fields
from mingpt_ddp.storage.run_dir import RunStatus, read_result, recorded_config, run_directory, with_run_name

Known: TypeAlias = tuple[str, float | None]  # the run.name of a job, and its validation loss if it is done


def look_up(config: Config, varying: dict[str, str]) -> Known:
    name = name_job(config, varying)
    return name, _objective(run_directory(with_run_name(config, name)), config)


def name_job(config: Config, varying: dict[str, str]) -> str:
    """The `run.name` of a job: below that of the sweep what varies, readable, and a digest of what the job is.

    The words in front may be others when the sweep is edited; whatever ends with the digest is the job's directory.
    """
    values = {f"{group}.{key}": value for group, keys in config.to_dict().items() for key, value in keys.items()}
    # As they are, not as they were written: 100 and 1e2 are one job.
    beside = {k: json.dumps(values.get(k, text)) for k, text in varying.items() if k not in _in_digest(config)}
    if config.run.name is None:
        return config.run_name(beside)
    digest = config.digest(beside)
    there = sorted(Path(config.run.root, config.run.name).glob(f"*-{digest}"))
    readable = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", ",".join(f"{k}={v}" for k, v in sorted(varying.items())))
    directory = there[0].name if there else f"{readable.lstrip('._=,+-')[:100] or 'job'}-{digest}"
    return f"{config.run.name}/{directory}"


def _in_digest(config: Config) -> set[str]:
    """The keys and groups whose values a configuration's digest covers."""
    made = hashed_fields(config.to_dict())
    del made["seed"]
    keys = {f"{group}.{key}" for group, values in made.items() for key in values}
    return {*keys, "model", "optimizer", "data", "run.seed"}


def _objective(directory: Path, config: Config) -> float | None:
    """The validation loss of a job that is done; None where there is something left to do."""
    result, recorded = read_result(directory), recorded_config(directory)
    if config.run.resume == "never" or recorded is None:
        return None
    try:
        pruned = result.get("status") == RunStatus.PRUNED and config.trainer.prune != "none"
        ended = result.get("status") == RunStatus.COMPLETE or (pruned and result["step"] >= config.trainer.prune_after)
        wanted = config.to_dict()
        # What had no such limit went on to the other one; a smaller one was reached on the way.
        limits = [(recorded["trainer"][key], wanted["trainer"][key]) for key in LIMITS]
        reached = all(old is None or (new is not None and new <= old) for old, new in limits)
        same = hashed_fields(recorded) == hashed_fields(wanted) and reached
        known = type(result["val_loss"]) in (int, float) and math.isfinite(result["val_loss"])
        return float(result["val_loss"]) if ended and same and known else None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):  # the files were made by something else
        return None
