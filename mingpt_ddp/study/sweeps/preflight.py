"""Check a sweep and lock its directory before its first job."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import IO

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict, read_write

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.config import flatten
from mingpt_ddp.config.own_loop import refuse_unread_keys, resolving_script
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.device.machine import count_cores
from mingpt_ddp.errors import counted
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.storage.lock import acquire_lock
from mingpt_ddp.storage.run_directory import (
    WRITTEN_INTO_BY_SWEEP,
    refuse_links,
    refuse_other_loop,
)
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.study.results.objective import (
    BITS_PER_BYTE,
    WHY_BITS_PER_BYTE,
    default_objective,
    loss_unit,
)
from mingpt_ddp.study.results.runs import is_run
from mingpt_ddp.study.results.sequential_record import SequentialRecord
from mingpt_ddp.study.sweeps.checks import (
    check_jobs,
    check_zip,
    parse_overrides,
    uses_our_sweeper,
)
from mingpt_ddp.study.sweeps.settings import check_settings, plan_slots
from mingpt_ddp.study.sweeps.sources import check_search, make_source, number_of_jobs
from mingpt_ddp.study.sweeps.sweep import Sweep
from mingpt_ddp.study.sweeps.until_decided import NeededJobs, sequential_rule

log = logging.getLogger(__name__)


def start_sweep(config: DictConfig, env: DistEnv) -> Sweep:
    """Check a sweep, lock its directory, and set its directory in Hydra's configuration.

    Raises:
        UserError: The sweep cannot run.
    """
    overrides = parse_overrides(config)
    zipped = check_zip(config, overrides)
    jobs = check_jobs(config.hydra, overrides, zipped, env)
    our_sweeper = uses_our_sweeper(config)
    first = jobs[0]
    # Disable Ray's usage reports, in case Ray is the launcher.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own_directory = Path(first.run.root, first.run.name) if first.run.name is not None else None
    settings = check_settings(config, jobs, env)
    is_remote = hydra_utils.is_external(str(config.hydra.launcher._target_))
    script = resolving_script()
    if script is not None:
        keys = [hydra_utils.key_of(str(each.input_line)) for each in overrides]
        refuse_unread_keys(keys, script)
        check(
            settings.pruner == "none",
            "sweep.pruner does not work with a script of your own, because it needs "
            "the evaluations of main.py; leave it out",
        )
        check(
            settings.parallel == 1 and not is_remote and env.is_standalone and our_sweeper,
            "a sweep over a script of your own runs its jobs one after another on this machine; "
            "leave out sweep.parallel, launchers, other sweepers and torchrun",
        )
    objective = default_objective(loss_unit(flatten(job.to_dict())) for job in jobs)
    uses_bits_per_byte = settings.metric is None and objective is BITS_PER_BYTE
    given_metric = settings.metric
    if uses_bits_per_byte:
        settings = replace(settings, metric=objective.key)
    slots = plan_slots(settings, jobs, own_directory) if our_sweeper and not is_remote else []
    if own_directory is not None:
        is_single_run = env.call_on_rank_zero(lambda: is_run(own_directory))
        check(
            not is_single_run,
            f"run.name={first.run.name} names a single run, not a sweep; choose another run.name",
        )
    directory = own_directory or Path(first.run.root)
    first = replace(first, sweep=settings)
    if settings.is_search:
        check_search(first, overrides)
    rule = sequential_rule(first, overrides)
    lock = env.call_on_rank_zero(lambda: _lock(own_directory, script) if own_directory else None)
    sweep = Sweep(
        env=env,
        config=first,
        directory=directory,
        n_jobs=number_of_jobs(settings, overrides, our_sweeper),
        is_remote=is_remote,
        source=make_source(first, overrides, directory, env) if our_sweeper else None,
        slots=slots,
        lock=lock,
        script=script,
        file=SweepFile(env.call_on_rank_zero(lambda: own_directory)),
    )
    if our_sweeper:
        env.call_on_rank_zero(lambda: _record_settings(sweep, given_metric, rule))
    title = f"a sweep of {counted(sweep.n_jobs, 'job')}" if sweep.n_jobs else "a sweep"
    log.info("starting %s in %s", title, directory)
    with read_write(config), read_write(config.hydra), open_dict(config):
        if uses_bits_per_byte:
            log.info("the objective is %s: %s", objective.title, WHY_BITS_PER_BYTE)
        if not our_sweeper:  # the jobs can get these values only from Hydra's own overrides
            hydra_overrides = config.hydra.overrides.hydra
            if uses_bits_per_byte:
                hydra_overrides.append(f"sweep.metric={settings.metric}")
            constant_keys = _constant_keys(overrides)
            hydra_overrides.append(
                f"hydra.job.config.override_dirname.exclude_keys={constant_keys}"
            )
        config.hydra.sweep.dir = str(directory)
    return sweep


def _lock(directory: Path, script: Path | None) -> IO[str]:
    """Lock the directory of a sweep.

    Args:
        script: The script whose own loop trains the jobs. None for the loop of main.py.

    Raises:
        ConfigError: Another training loop has trained a job in this directory.
        RunError: A link in the directory leads outside, or another process holds the lock.
    """
    for job in directory.glob("*/"):
        refuse_other_loop(job, script)
    refuse_links(directory.glob("*"), WRITTEN_INTO_BY_SWEEP)
    return acquire_lock(directory)


def _record_settings(sweep: Sweep, metric: str | None, rule: SequentialRecord | None) -> None:
    """Record the settings that later starts of the sweep need: metric, rule, and cores of a job.

    Args:
        metric: sweep.metric as configured. None for the default objective.
        rule: The rule of sweep.until=decided. None without this setting.

    Raises:
        ConfigError: The directory has a record of a different rule.
    """
    if rule is not None:
        sweep.needed_jobs = NeededJobs(sweep.directory, sweep.file, rule)
    sweep.file.keep_metric(metric)
    if sweep.file.cores is None:
        sweep.file.keep_cores(len(sweep.slots[0].cores) if sweep.slots else count_cores())


def _constant_keys(overrides: list[Override]) -> str:
    """List the overridden keys that do not vary, in Hydra's syntax."""
    keys = ["'sweep.metric'"]  # `start_sweep` may override this key
    for override in overrides:
        if not override.is_sweep_override():
            keys.append(repr(hydra_utils.key_of(str(override.input_line))))
    return f"[{','.join(keys)}]"
