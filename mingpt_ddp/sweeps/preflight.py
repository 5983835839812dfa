"""What happens before the first job of a sweep: its checks, and its lock."""

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.device.machine import count_cores
from mingpt_ddp.distributed.env import DistEnv, read_env
from mingpt_ddp.distributed.exit import ProcessExit
from mingpt_ddp.errors import ConfigError, UserError, counted
from mingpt_ddp.results.objective import (
    LOSS,
    WHY_BITS_PER_BYTE,
    loss_unit,
    objective_of,
)
from mingpt_ddp.results.runs import is_run
from mingpt_ddp.storage.lock import acquire_lock
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.sweeps.checks import check_hydra_keys, check_jobs, parse_overrides
from mingpt_ddp.sweeps.jobs import limits_of
from mingpt_ddp.sweeps.schedule import check_schedule, has_own_sweeper, plan_slots
from mingpt_ddp.sweeps.sources import number_of_jobs, source_of
from mingpt_ddp.sweeps.sweep import Sweep

log = logging.getLogger(__name__)


class Preflight(Callback):
    """Hydra's callback that checks a run or a sweep before anything is written."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with _exit_on_error():
            check_hydra_keys(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # so that Hydra's shuffle() has the same order on every rank and at every start
        random.seed(0)
        with _exit_on_error():
            check_hydra_keys(config)
            _start(config, read_env(), Sweep.current())


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit on an exception, which Hydra would only log as a warning."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError):
            error = ConfigError(explain(error))
        ProcessExit().user_error(error)


def _start(config: DictConfig, env: DistEnv, sweep: Sweep) -> None:
    """Check the sweep, adapt Hydra's configuration, and lock the directory.

    Raises:
        UserError: the sweep cannot run.
    """
    overrides = parse_overrides(config)
    jobs = check_jobs(config.hydra, overrides, env)
    first = jobs[0]
    # disable usage reports if Ray is the launcher
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sweep.env = env
    sweep.launcher = str(config.hydra.launcher._target_)
    sweep.directory = Path(first.run.root, first.run.name or "")
    objective = objective_of(loss_unit(flatten(job.to_dict())) for job in jobs)
    sweep.settings = check_schedule(config, jobs, env, objective)
    is_ours = has_own_sweeper(config)
    if is_ours and not sweep.uses_external_launcher:
        sweep.slots = plan_slots(sweep.settings, jobs, sweep.directory)
        sweep.settings = replace(sweep.settings, parallel=max(1, len(sweep.slots)))
    if first.run.name is not None:
        is_single_run = env.call_on_rank_zero(lambda: is_run(sweep.directory))
        check(
            not is_single_run,
            f"run.name={first.run.name} names a single run, not a sweep; choose another run.name",
        )
    if is_ours:
        sweep.source = source_of(sweep.settings, overrides, first, sweep.directory, env)
    if first.run.name is not None:
        sweep.lock = env.call_on_rank_zero(lambda: acquire_lock(sweep.directory))
        sweep.file = env.call_on_rank_zero(lambda: SweepFile(sweep.directory)) or sweep.file
    sweep.planned = number_of_jobs(sweep.settings, overrides)
    if is_ours:
        env.call_on_rank_zero(partial(_begin, sweep, first))
    log.info("a sweep of %s, in %s", counted(sweep.planned, "job"), sweep.directory)
    with read_write(config), read_write(config.hydra), open_dict(config):
        for_jobs = config.hydra.overrides.hydra
        if objective is not LOSS:
            log.info("the objective is %s: %s", objective.title, WHY_BITS_PER_BYTE)
            for_jobs.append(f"+{hydra_utils.OBJECTIVE_KEY}={objective.metric}")
        for_jobs.append(f"hydra.job.config.override_dirname.exclude_keys={_constant(overrides)}")
        config.hydra.sweep.dir = str(sweep.directory)


def _begin(sweep: Sweep, first: Config) -> None:
    """Write what the sweep keeps from its first start on."""
    sweep.limits = limits_of(first)
    if sweep.file.cores is None:
        sweep.file.keep_cores(len(sweep.slots[0].cores) if sweep.slots else count_cores())
    if sweep.trials is not None:
        sweep.trials.begin()


def _constant(overrides: list[Override]) -> str:
    """Return the keys that do not vary, as a list for Hydra."""
    keys = []
    for override in overrides:
        if not override.is_sweep_override():
            keys.append(repr(hydra_utils.key_of(str(override.input_line))))
    return f"[{','.join(keys)}]"
