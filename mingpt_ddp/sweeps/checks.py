"""The checks of a sweep before its first job: Hydra's settings, the overrides, the values."""

from collections.abc import Iterator
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.device.machine import check_machine
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import ConfigError

# Keys that only a search uses.
OF_SEARCH = ("sweep.trials", "sweep.seed", "sweep.sampler_settings")
# Of a key with more values, only so many first ones and the last one are checked.
MAX_CHECKED_VALUES = 32


def check_hydra_keys(config: DictConfig) -> None:
    """Reject Hydra settings that would be ignored or that conflict with run.root and run.name."""
    check(
        not config.hydra.job.chdir,
        "hydra.job.chdir=true would move the jobs away from run.root; leave it out",
    )
    check(not config.hydra.verbose, "hydra.verbose has no effect here; leave it out")
    # Do not resolve interpolations: some have no value before a job runs.
    hydra: Any = OmegaConf.to_container(config.hydra, resolve=False)
    run, sweep = hydra["run"], hydra["sweep"]
    for key, value, *allowed in (
        ("run.dir", run["dir"], "."),
        ("sweep.dir", sweep["dir"], "${run.root}", str(config.run.root)),
        ("sweep.subdir", sweep["subdir"], "."),
        ("output_subdir", hydra["output_subdir"], None),
    ):
        check(
            value in allowed,
            f"hydra.{key}={value} has no effect here: run.root and run.name set the run directory",
        )
    size = OmegaConf.select(config, "hydra.sweeper.max_batch_size")
    check(size is None or size >= 1, f"hydra.sweeper.max_batch_size={size} must be at least 1")


def parse_overrides(config: DictConfig) -> list[Override]:
    """Parse the overrides of the sweep, beginning with the overrides of its preset.

    If a key has several overrides, the last one counts, as in Hydra.
    """
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    by_key = {override.get_key_element(): override for override in parser.parse_overrides(words)}
    overrides = list(by_key.values())
    for override in overrides:
        check(expand(override), f"{override.input_line} has no values to sweep over")
        if config.sweep.sampler is not None:
            continue
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.input_line} is for a search: add sweep=optuna, or list values"
            )
        check(
            override.get_key_element() not in OF_SEARCH,
            f"{override.input_line} is used by a search only: add sweep=optuna, or leave it out",
        )
    return overrides


def check_jobs(hydra: DictConfig, overrides: list[Override], env: DistEnv) -> list[Config]:
    """Compose and check a selection of the jobs.

    The first job has the first value of each key. Then each other value of a key is checked with
    the first values of all other keys. See MAX_CHECKED_VALUES for keys with many values.

    Returns:
        The configurations of these jobs. The first job comes first.

    Raises:
        ConfigError: A job is invalid.
    """
    configs = []
    # Other overrides of Hydra's own keys do not change a job.
    search = [w for w in hydra.overrides.hydra if hydra_utils.key_of(w) == "hydra.searchpath"]
    try:
        for job in _checked_jobs([expand(override) for override in overrides]):
            composed = compose(hydra.job.config_name, [*search, *job])
            configs.append(hydra_utils.to_config(composed, hydra, job))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    for config in configs:
        if config.ddp.nproc_per_node != "gpu":
            check_machine(config)
    starts_workers = any(config.ddp.nproc_per_node for config in configs)
    check(
        not starts_workers or env.is_standalone or env.has_local_rank,
        "ddp.nproc_per_node cannot sweep where RANK is set; leave it out, and start the ranks with "
        "torchrun",
    )
    check(
        len({(config.run.root, config.run.name) for config in configs}) == 1,
        "run.root and run.name must be the same for all jobs of a sweep; they name its directory",
    )
    name = configs[0].run.name
    check(
        name is None or "/" not in name,
        f"run.name={name} must be one name in a sweep: it holds the jobs' directories",
    )
    return configs


def _checked_jobs(values: list[list[str]]) -> Iterator[list[str]]:
    """Yield the overrides of the jobs to check.

    Args:
        values: For each key, one override per value.
    """
    first = [choices[0] for choices in values]
    yield first
    for i, choices in enumerate(values):
        others = choices[1:MAX_CHECKED_VALUES]
        if len(choices) > MAX_CHECKED_VALUES:
            others.append(choices[-1])
        for other in others:
            yield [*first[:i], other, *first[i + 1 :]]


def expand(override: Override) -> list[str]:
    """Return one override per value of a sweep override.

    For an interval, return both ends and a value between them.
    """
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    key = override.get_key_element()
    if isinstance(value, IntervalSweep):
        start = value.start or 0
        end = value.end or 0
        inside = start + 0.618 * (end - start)  # rarely a whole number, like sampled values
        if isinstance(start, int) and isinstance(end, int):
            inside = int(inside)
        return [f"{key}={choice}" for choice in (start, inside, end)]
    return [f"{key}={choice}" for choice in override.sweep_string_iterator()]
