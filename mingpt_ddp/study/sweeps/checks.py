"""Check the overrides and values of a sweep before its first job."""

import itertools
import random
from collections.abc import Iterator, Sequence

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.compose.resolve import to_job
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.hints import known_keys, suggest
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.device.machine import check_machine
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.env import DistEnv

# Keys that only a search may set.
SEARCH_KEYS = ("sweep.trials", "sweep.seed", "sweep.sampler_settings")
# If a key has more values than this number, check only its first values, up to this number, and its
# last value.
MAX_CHECKED_VALUES = 32


def uses_our_sweeper(config: DictConfig) -> bool:
    """Return True if this package's sweeper runs the jobs, and not another sweeper of Hydra."""
    return bool(config.hydra.sweeper._target_ == hydra_utils.SWEEPER)


def parse_overrides(config: DictConfig) -> list[Override]:
    """Parse the overrides of the sweep: the ones in its preset, then the ones on the command line.

    If a key has several overrides, the last one counts, as in Hydra.
    """
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    by_key = {override.get_key_element(): override for override in parser.parse_overrides(texts)}
    overrides = list(by_key.values())
    for override in overrides:
        check(
            expand(override),
            f"{override.input_line} has no values to sweep over; give it at least one",
        )
        if config.sweep.sampler is not None or not uses_our_sweeper(config):
            continue
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.input_line} is only for a search: add sweep=optuna, or list values"
            )
        check(
            override.get_key_element() not in SEARCH_KEYS,
            f"{override.input_line} is only for a search: add sweep=optuna, or leave it out",
        )
    return overrides


def check_jobs(
    hydra: DictConfig, overrides: list[Override], zipped: Sequence[str], env: DistEnv
) -> list[Config]:
    """Compose some jobs of the sweep, and check their configurations.

    The first job has the first value of each key. After that, each other value of a key has one
    job, with the first values of all other keys. See MAX_CHECKED_VALUES for keys with many values.

    Args:
        hydra: Hydra's own configuration.
        zipped: The keys in `sweep.zip`.

    Returns:
        The configurations of these jobs. The first job comes first.

    Raises:
        ConfigError: A job is invalid.
    """
    configs = []
    # Of the overrides of Hydra's own keys, only hydra.searchpath can change a job.
    search_path = [w for w in hydra.overrides.hydra if hydra_utils.key_of(w) == "hydra.searchpath"]
    try:
        for job in _checked_jobs(choices(overrides, zipped)):
            composed = compose(hydra.job.config_name, [*search_path, *job])
            configs.append(to_job(composed, hydra, job).config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    for config in configs:
        if config.ddp.nproc_per_node != "gpu":
            check_machine(config)
    starts_workers = any(config.ddp.nproc_per_node for config in configs)
    check(
        not starts_workers or env.is_standalone or env.has_local_rank,
        "ddp.nproc_per_node cannot start workers for a sweep if RANK is set; leave it out, and "
        "start the ranks with torchrun",
    )
    check(
        len({(config.run.root, config.run.name) for config in configs}) == 1,
        "run.root and run.name must be the same for all jobs of a sweep, because they name the "
        "directory of the sweep; give each of them one value",
    )
    name = configs[0].run.name
    check(
        name is None or "/" not in name,
        f"run.name={name} must not contain a / in a sweep; it names the directory of all jobs",
    )
    return configs


def _checked_jobs(values: list[list[list[str]]]) -> Iterator[list[str]]:
    """Yield the overrides of each job that `check_jobs` checks.

    Args:
        values: The result of `choices`.
    """
    first = [each[0] for each in values]
    yield [*itertools.chain(*first)]
    for i, each in enumerate(values):
        others = each[1:MAX_CHECKED_VALUES]
        if len(each) > MAX_CHECKED_VALUES:
            others.append(each[-1])
        for other in others:
            yield [*itertools.chain(*first[:i], other, *first[i + 1 :])]


def check_zip(config: DictConfig, overrides: list[Override]) -> list[str]:
    """Return the keys in `sweep.zip`, after a check that all have the same number of values.

    Raises:
        ConfigError: The numbers of values differ, or a key has no list of values.
    """
    zipped = config.sweep.zip
    check(
        zipped is None or isinstance(zipped, ListConfig),
        f"sweep.zip={zipped} must be a list of keys, as in sweep.zip=[optimizer.lr,model.n_embd]",
    )
    keys = [*map(str, zipped or ())]
    check(
        not keys or (config.sweep.sampler is None and uses_our_sweeper(config)),
        "sweep.zip is for lists of values, not for a search or another sweeper; leave it out",
    )
    counts = {}
    for override in overrides:
        if override.is_sweep_override():
            counts[override.get_key_element()] = len(expand(override))
    for key in keys:
        hint = f", as in {key}=A,B" if key in known_keys() else suggest(key)
        check(key in counts, f"sweep.zip names {key}, which has no list of values{hint}")
    lengths = [f"{key} has {counts[key]}" for key in keys]
    check(
        len({counts[key] for key in keys}) <= 1,
        f"sweep.zip needs lists of the same length, but {', '.join(lengths)} values",
    )
    return keys


def choices(overrides: list[Override], zipped: Sequence[str]) -> list[list[list[str]]]:
    """Return a list for each key of a grid. A job of the grid has one item from each list.

    An item is a list with the override for one value. The keys in `sweep.zip` vary together, so
    they share one list, at the position of the first of these keys. Each of its items has an
    override for every one of these keys.
    """
    by_key = {override.get_key_element(): expand(override) for override in overrides}
    together = [by_key[key] for key in by_key if key in zipped]
    combined = []
    for key, words in by_key.items():
        if key not in zipped:
            combined.append([[word] for word in words])
        elif together:
            combined.append([[*row] for row in zip(*together, strict=True)])
            together = []
    return combined


def is_seed(words: list[list[str]]) -> bool:
    """Return True if a list that `choices` returned overrides run.seed and no other key."""
    return all(len(each) == 1 and hydra_utils.key_of(each[0]) == "run.seed" for each in words)


def expand(override: Override) -> list[str]:
    """Split a sweep override into one override for each value.

    For an interval, use both ends and a value between them.
    """
    if not override.is_sweep_override():
        return [str(override.input_line)]
    # Hydra's shuffle() must give the same order on every rank and at every start.
    random.seed(0)
    value = override.value()
    key = override.get_key_element()
    if isinstance(value, IntervalSweep):
        start = value.start or 0
        end = value.end or 0
        # Sampled values are rarely whole numbers, so this factor rarely gives a whole number.
        inside = start + 0.618 * (end - start)
        if isinstance(start, int) and isinstance(end, int):
            inside = int(inside)
        return [f"{key}={choice}" for choice in (start, inside, end)]
    return [f"{key}={choice}" for choice in override.sweep_string_iterator()]
