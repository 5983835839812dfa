"""A search: a sweep whose values Optuna draws.

It is continued by drawing the same trials again: those that are done return what they returned before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import ConfigError, RunError

PATIENCE_S = 60  # for somebody else who reads the study


def is_search(config: DictConfig) -> bool:
    return OmegaConf.select(config, "hydra.sweeper.sampler") is not None


def check_search(config: DictConfig) -> None:
    """What the plugin would find out when it has already made a new study.

    Raises:
        ConfigError: it cannot search like this.
    """
    sweeper = config.hydra.sweeper
    for key, least, most in (("n_trials", 1, math.inf), ("n_jobs", 1, math.inf), ("max_failure_rate", 0, 1)):
        value = sweeper[key]
        if not least <= value <= most:
            bound = "at least" if value < least else "at most"
            raise ConfigError(f"hydra.sweeper.{key}={value} must be {bound} {least if value < least else most}")
    if getattr(sweeper.direction, "name", sweeper.direction) != "minimize":
        raise ConfigError(f"hydra.sweeper.direction={sweeper.direction} must be minimize: the objective is a loss")
    if "seed" in sweeper.sampler and sweeper.sampler.seed is None:
        raise ConfigError(
            "hydra.sweeper.sampler.seed is null: every rank, and every start of this search, would draw other trials; "
            "give it a number"
        )
    try:
        instantiate(sweeper.sampler)
    except Exception as error:  # of any sampler
        told = " ".join(str(error.__cause__ or error).split())[:300]
        raise ConfigError(f"hydra.sweeper.sampler cannot be used: {told}") from error


def quiet() -> None:
    """Optuna tells of every trial on the console, where the jobs tell more."""
    with contextlib.suppress(ImportError):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("hydra_plugins").setLevel(logging.ERROR)


def study_of(config: DictConfig, env: DistEnv) -> Path | None:
    """The file of the study, where this process is the one that writes it; others are told to write none.

    Raises:
        ConfigError: a study that cannot be written.
    """
    storage = OmegaConf.select(config, "hydra.sweeper.storage")
    if storage is None:
        return None
    file = re.fullmatch(r"sqlite:///([^?]+)(\?.*)?", str(storage))
    if not file:
        raise ConfigError(f"hydra.sweeper.storage={storage} must be sqlite:///FILE or null")
    with contextlib.suppress(PackageNotFoundError):
        if version("optuna").startswith("2.") and not version("sqlalchemy").startswith("1."):
            raise ConfigError(
                f"Optuna {version('optuna')} cannot write a study by SQLAlchemy {version('sqlalchemy')}; "
                "install what constraints.txt says for the extra sweep"
            )
    if not env.is_rank_zero:
        config.hydra.sweeper.storage = None
        return None
    if not file[2]:
        config.hydra.sweeper.storage = f"{storage}?timeout={PATIENCE_S}"
    return Path(file[1])


def put_aside(study: Path) -> None:
    """The study is written anew: the results themselves lie with the jobs. One without a trial is no loss.

    Raises:
        RunError: its directory cannot be written.
    """
    try:
        study.parent.mkdir(parents=True, exist_ok=True)
        if study.exists() and _is_empty(study):
            study.unlink()
            study.with_name(f"{study.name}-journal").unlink(missing_ok=True)
            return
        for end in ("-journal", ""):  # what a kill left half written needs its journal
            before = study.with_name(f"{study.name}.before{end}")
            before.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                study.with_name(study.name + end).replace(before)
    except OSError as error:
        raise RunError(f"cannot write {study}: {error.strerror}; choose another hydra.sweeper.storage") from error


def _is_empty(study: Path) -> bool:
    """Whether it is a study of no trial; what cannot be read is none."""
    import sqlite3

    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{study.absolute().as_uri()}?mode=ro", uri=True)) as database,
    ):
        return database.execute("SELECT count(*) FROM trials").fetchone() == (0,)
    return False
