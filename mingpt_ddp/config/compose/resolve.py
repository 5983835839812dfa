"""Build a job from the configuration that Hydra has composed, and from Hydra's global state.

A job is a run with its checked configuration, before it starts (config/job.py).
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from mingpt_ddp.config.compose.hydra_utils import key_of, key_of_group
from mingpt_ddp.config.config import to_plain
from mingpt_ddp.config.job import Job, SweepPlace, job_name


def resolve(cfg: DictConfig, swept: Collection[str] | None = None) -> Job:
    """Return the job of the configuration that Hydra has just composed.

    Args:
        cfg: The configuration of a single run, or of a job of a sweep.
        swept: Keys that the sweep varies. None to derive them from Hydra's state: for a sweeper of
            another package, `mingpt_ddp.study.sweeps.preflight` has stored the overridden keys that
            do not vary as `override_dirname.exclude_keys`.

    Raises:
        ConfigError, CodeError: A key, a value or a user's file is invalid.
    """
    hydra = HydraConfig.get()
    words = _words(hydra.overrides.task)
    job = replace(to_job(cfg, hydra, words), hydra_files=_hydra_files(cfg))
    if hydra.mode != RunMode.MULTIRUN:
        return job
    values = {key_of(word): word.partition("=")[2] for word in words}
    if swept is None:
        swept = values.keys() - set(hydra.job.config.override_dirname.exclude_keys)
    swept_values = {key: value for key, value in values.items() if key in swept}
    job = job.with_run(name=job_name(job.config, swept_values))
    return replace(job, place=SweepPlace.of(int(hydra.job.num), swept_values))


def compose_job(
    context: HydraContext,
    config: DictConfig,
    number: int,
    overrides: list[str],
    swept: Collection[str],
) -> Job:
    """Compose a job of a sweep, and store it as Hydra's state, as Hydra's own launcher does.

    Args:
        context: Hydra's context, which loads configurations.
        config: Hydra's configuration of the sweep.
        number: Number of the job in the sweep, from 0.
        overrides: Overrides of the job.
        swept: Keys that the sweep varies.
    """
    composed = context.config_loader.load_sweep_config(config, [*overrides])
    with open_dict(composed):
        composed.hydra.job.id = str(number)
        composed.hydra.job.num = number
    HydraConfig.instance().set_config(composed)
    task_config = composed.copy()
    with open_dict(task_config):
        del task_config["hydra"]
    return resolve(task_config, swept)


def command_line_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Return the keys that overrides set, and the keys that contain these keys.

    An override of model.part_settings.window also sets model.part_settings.
    """
    keys = {*map(key_of, overrides)}
    return frozenset(keys | {key_of_group(key) for key in keys})


def to_job(cfg: DictConfig, hydra: Any, overrides: Iterable[str]) -> Job:
    """Run the user's files that a composed configuration names, and return its job.

    Args:
        hydra: The `hydra` node of the composed configuration.
        overrides: Overrides from the command line.

    Raises:
        ConfigError, CodeError: A key, a value or a user's file is invalid.
    """
    return Job.build(
        to_plain(cfg),
        command_line_keys(overrides),
        preset_directories(hydra),
        {str(key): str(value) for key, value in hydra.runtime.choices.items()},
        {},
    )


def preset_directories(hydra: Any) -> list[str]:
    """Return the directories in which Hydra looks for presets, in its order."""
    sources = hydra.runtime.config_sources
    return [str(Path(source.path).absolute()) for source in sources if source.schema == "file"]


def application_state() -> tuple[frozenset[str], list[str]]:
    """Return the command-line keys of another Hydra application, and its preset directories.

    Both are empty if the application does not use `@hydra.main`.
    """
    if not HydraConfig.initialized():
        return frozenset(), []
    hydra = HydraConfig.get()
    return command_line_keys(_words(hydra.overrides.task)), preset_directories(hydra)


def _words(overrides: Any) -> list[str]:
    """Return overrides as they are on the command line, with unresolved interpolations."""
    words: Any = OmegaConf.to_container(overrides, resolve=False)
    return [*words]


def _hydra_files(cfg: DictConfig) -> dict[str, str]:
    """Return the contents of the files that Hydra would write to `.hydra/`, by name."""
    whole: Any = HydraConfig.instance().cfg
    return {
        "config.yaml": OmegaConf.to_yaml(cfg),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(whole, ["hydra"])),
        "overrides.yaml": OmegaConf.to_yaml(whole.hydra.overrides.task),
    }
