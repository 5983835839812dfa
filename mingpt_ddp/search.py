"""A search: a sweep whose values Optuna draws.

It is continued by drawing the same trials again: those that are done return what they returned before.
"""

from __future__ import annotations

import contextlib
import logging
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mingpt_ddp.errors import ConfigError, RunError
from mingpt_ddp.place import Place


def is_search(config: DictConfig) -> bool:
    return OmegaConf.select(config, "hydra.sweeper.sampler") is not None


def check_sampler(config: DictConfig) -> None:
    """
    Raises:
        ConfigError: a sampler that draws other values each time.
    """
    sampler = OmegaConf.select(config, "hydra.sweeper.sampler")
    if sampler is not None and "seed" in sampler and sampler.seed is None:
        raise ConfigError(
            "hydra.sweeper.sampler.seed is null: every rank, and every start of this search, would draw other trials; "
            "give it a number"
        )


def quiet() -> None:
    """Optuna tells of every trial on the console, where the jobs tell more."""
    with contextlib.suppress(ImportError):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("hydra_plugins").setLevel(logging.ERROR)


def study_of(config: DictConfig, place: Place) -> Path | None:
    """The file of the study, where this process is the one that writes it; others are told to write none.

    Raises:
        ConfigError: a study that cannot be written.
    """
    storage = OmegaConf.select(config, "hydra.sweeper.storage")
    if storage is None:
        return None
    file = re.fullmatch(r"sqlite:///([^?]+)", str(storage))
    if not file:
        raise ConfigError(f"hydra.sweeper.storage={storage} must be sqlite:///FILE or null")
    with contextlib.suppress(PackageNotFoundError):
        if version("optuna").startswith("2.") and not version("sqlalchemy").startswith("1."):
            raise ConfigError(
                f"Optuna {version('optuna')} cannot write a study by SQLAlchemy {version('sqlalchemy')}; "
                "install what constraints.txt says for the extra sweep"
            )
    if not place.is_main:
        config.hydra.sweeper.storage = None
        return None
    return Path(file[1])


def put_aside(study: Path) -> None:
    """The study is written anew: the results themselves lie with the jobs.

    Raises:
        RunError: its directory cannot be written.
    """
    try:
        study.parent.mkdir(parents=True, exist_ok=True)
        for end in ("-journal", ""):  # what a kill left half written needs its journal
            before = study.with_name(f"{study.name}.before{end}")
            before.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                study.with_name(study.name + end).replace(before)
    except OSError as error:
        raise RunError(f"cannot write {study}: {error.strerror}; choose another hydra.sweeper.storage") from error
