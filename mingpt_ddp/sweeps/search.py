"""A search: a sweep whose values Optuna samples.

A search resumes by sampling the same trials from the same seed; complete jobs return their
recorded loss.
"""

import contextlib
import logging
import re
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import ConfigError, RunError

SQLITE_URL = r"sqlite:///([^?]+)(\?.*)?"
SQLITE_TIMEOUT_S = 60  # for which Optuna waits for another process to unlock the study


def is_search(config: DictConfig) -> bool:
    return OmegaConf.select(config, "hydra.sweeper.sampler") is not None


def check_search(config: DictConfig) -> None:
    """Check what the plugin would reject only after creating a study.

    Raises:
        ConfigError: a setting is invalid.
    """
    sweeper = config.hydra.sweeper
    share = sweeper.max_failure_rate
    check(0 <= share <= 1, f"hydra.sweeper.max_failure_rate={share} must lie in [0, 1]")
    if getattr(sweeper.direction, "name", sweeper.direction) != "minimize":
        raise ConfigError(
            f"hydra.sweeper.direction={sweeper.direction} must be minimize: the objective is a loss"
        )
    if "seed" in sweeper.sampler and sweeper.sampler.seed is None:
        raise ConfigError(
            "hydra.sweeper.sampler.seed is null: every rank and every start would sample "
            "other trials; give it a number"
        )
    try:
        instantiate(sweeper.sampler)
    except Exception as error:  # exceptions differ by sampler
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise ConfigError(f"hydra.sweeper.sampler cannot be used: {reason}") from error
    if sweeper.storage is not None and not re.fullmatch(SQLITE_URL, str(sweeper.storage)):
        raise ConfigError(f"hydra.sweeper.storage={sweeper.storage} must be sqlite:///FILE or null")


def start_search(config: DictConfig, env: DistEnv) -> None:
    """Prepare a new study, written by rank zero alone; the job directories hold the results.

    Raises:
        RunError: the study's directory cannot be written.
    """
    for name in ("optuna", "hydra_plugins"):  # they log a line per trial; the jobs log more
        logging.getLogger(name).setLevel(logging.ERROR)
    url = config.hydra.sweeper.storage
    if url is not None and (match := re.fullmatch(SQLITE_URL, str(url))):
        env.call_on_rank_zero(lambda: _backup(Path(match[1])))
        timeout = "" if match[2] else f"?timeout={SQLITE_TIMEOUT_S}"
        config.hydra.sweeper.storage = env.call_on_rank_zero(lambda: f"{url}{timeout}")


def _backup(study: Path) -> None:
    """Rename a study and the journal of an unfinished write to FILE.before.

    Delete a study that is empty.
    """
    try:
        study.parent.mkdir(parents=True, exist_ok=True)
        if study.exists() and _is_empty(study):
            study.unlink()
            study.with_name(f"{study.name}-journal").unlink(missing_ok=True)
            return
        for suffix in ("-journal", ""):
            backup = study.with_name(f"{study.name}.before{suffix}")
            backup.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                study.with_name(study.name + suffix).replace(backup)
    except OSError as error:
        raise RunError(
            f"cannot write {study}: {error.strerror}; choose another hydra.sweeper.storage"
        ) from error


def _is_empty(study: Path) -> bool:
    """Return whether the file is a study without trials."""
    import sqlite3

    url = f"{study.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(url, uri=True)) as database:
            return bool(database.execute("SELECT count(*) FROM trials").fetchone() == (0,))
    except sqlite3.Error:
        return False
