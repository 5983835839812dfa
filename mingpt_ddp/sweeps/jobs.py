"""The jobs of a sweep: their directories, and whether they are complete."""

import json
import math
import re
from pathlib import Path

from mingpt_ddp.config.config import LIMITS, Config, flatten, numeric_keys, numeric_values
from mingpt_ddp.metrics.objective import Objective
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
    """Return the `run.name` of a job: the sweep's name, then the swept overrides in readable form
    and a digest.

    The digest identifies the job: a directory that ends with it is the job's, even if an edit of
    the sweep has changed the readable part.
    """
    plain = config.to_dict()
    values = flatten(plain)
    covered = {*numeric_keys(plain), "model", "optimizer", "data"}  # including presets
    # Parsed values, not their spelling: 100 and 1e2 are the same job.
    extra = {k: json.dumps(values.get(k, text)) for k, text in swept.items() if k not in covered}
    hashed = {"swept": extra} if extra else {}
    if config.run.name is None:
        return run_name(config, hashed)
    digest = config.digest(hashed)
    existing = sorted(Path(config.run.root, config.run.name).glob(f"*-{digest}"))
    readable = re.sub(
        r"[^A-Za-z0-9._=,+-]+", "_", ",".join(f"{k}={v}" for k, v in sorted(swept.items()))
    )
    directory = (
        existing[0].name if existing else f"{readable.lstrip('._=,+-')[:100] or 'job'}-{digest}"
    )
    return f"{config.run.name}/{directory}"


def _final_value(directory: Path, config: Config, objective: Objective) -> float | None:
    """Return the objective of a job that has reached the limits of `config`, else None."""
    result = read_result(directory)
    recorded = recorded_config(directory) or {}
    if config.run.resume == "never":
        return None
    try:
        pruned = result.get("status") == RunStatus.PRUNED and config.trainer.prune != "none"
        ended = result.get("status") == RunStatus.COMPLETE or (
            pruned and result["step"] >= config.trainer.prune_after
        )
        # A recorded limit of null did not apply: the other one was reached. Any smaller limit was
        # reached too.
        limits = [(recorded["trainer"][key], getattr(config.trainer, key)) for key in LIMITS]
        limits += (
            [(recorded["trainer"]["patience"], config.trainer.patience)]
            if result.get("stopped_early")
            else []
        )
        reached = all(old is None or (new is not None and new <= old) for old, new in limits)
        same = numeric_values(recorded) == numeric_values(config.to_dict())
        valid = type(result["val_loss"]) in (int, float) and math.isfinite(result["val_loss"])
        return objective.value(result) if ended and reached and same and valid else None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        # not written by a run
        return None
