"""Train: compose, validate, start local workers, report an error as one line."""

import gc
import logging
import os
import re
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from omegaconf import DictConfig

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.compose.worker_config import run_composed
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.device.machine import check_machine
from mingpt_ddp.distributed.env import (
    CALLER,
    DistEnv,
    has_parent_launcher,
    process_start_time,
    read_env,
    report_directories,
)
from mingpt_ddp.distributed.exit import (
    FAILURE,
    USER_ERROR,
    ProcessExit,
    die_with_parent,
    echo,
    exit_process,
)
from mingpt_ddp.distributed.launch.channels import reporter
from mingpt_ddp.distributed.launch.launcher import train_on_workers
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.interrupts import INTERRUPTED
from mingpt_ddp.results.objective import objective_named
from mingpt_ddp.storage.run_directory import (
    next_free_name,
    read_result,
    run_directory,
    with_run_name,
)
from mingpt_ddp.storage.urls import check_text
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.local_workers import (
    LocalJob,
    conclude_local,
    prepare_local,
)
from mingpt_ddp.sweeps.sweep import Sweep
from mingpt_ddp.training.start.checked_config import checked_config

if TYPE_CHECKING:
    from mingpt_ddp.distributed.runtime import Runtime

log = logging.getLogger(__name__)


def main(composed: DictConfig | None = None) -> None:
    """Run the command; always exit through os._exit.

    Args:
        composed: The configuration that the parent of this worker has composed. None if Hydra shall
            compose it from the command line.
    """
    # by default a third of the time in which torch is imported goes into collections
    gc.set_threshold(20_000)
    caller = os.environ.pop(CALLER, None)
    if composed is None and (caller or has_parent_launcher()):  # a local worker has done so
        die_with_parent(int(caller) if caller else None)
    if os.getpid() == 1:  # in a container: the kernel drops signals without a handler
        signal.signal(signal.SIGTERM, lambda number, _: exit_process(None, 128 + number))
    exits = ProcessExit()
    try:
        if text := hydra_utils.answer(sys.argv[1:]):
            echo(text)
            exit_process(None, 0)
        prepare(exits.env)
        try:
            if composed is None:
                if text := hydra_utils.run_hydra(train):
                    echo(text)
            else:
                run_composed(train, composed)
        finally:
            if "ray" in sys.modules:  # whose processes survive os._exit
                sys.modules["ray"].shutdown()
    except JobError as error:
        if Sweep.current().is_remote:  # otherwise already recorded
            Sweep.current().failed[0] = str(error.args[0])  # it knows no number
    except UserError as error:
        exits.user_error(error)
    except KeyboardInterrupt:  # while other processes run the jobs
        log.error("interrupted; rerun the same command to resume")
        exit_process(None, INTERRUPTED)
    except Exception as error:  # from Hydra or an external launcher; `train` raises none
        if Sweep.current().is_remote and not isinstance(error, HydraException):
            exits.user_error(RunError(str(error)))
        exits.user_error(ConfigError(explain(error)))
    logs.to_console(exits.env)
    Sweep.current().finish()
    # Normal interpreter shutdown sometimes aborts in a background thread of torch, which torchrun
    # counts as a failure. All files are written and the process group is closed.
    exit_process(None, 0)


def prepare(env: DistEnv) -> None:
    """Normalize the command line for Hydra, and the streams for any terminal.

    Raises:
        ConfigError: the command line contains a password, which Hydra would save, or a word that
            Hydra cannot read.
    """
    # torch.distributed.launch passes --local-rank, which Hydra rejects, besides LOCAL_RANK.
    words = [word for word in sys.argv[1:] if not re.match(r"--local[-_]rank\b", word)]
    sys.argv[1:] = hydra_utils.reorder_argv(words)
    logs.escape_what_streams_cannot_encode()
    logging.raiseExceptions = False  # no traceback when a log record cannot be written
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    logs.to_console(env)
    for word in sys.argv[1:]:
        refuse_credentials(word.partition("=")[0], word)
    hydra_utils.check_options(words)


def train(cfg: DictConfig) -> float:
    """Run one job and return its validation loss, or what else its sweep is ranked by.

    Raises:
        JobError: all ranks have failed in the same way, or the only one has; the sweep continues
            with the next job.
    """
    sweep = Sweep.current()
    exits = ProcessExit(hydra_utils.job_number())
    logs.to_console(exits.env)
    signals = SignalHandler(exits)
    signals.install()
    runtime: Runtime | None = None
    try:
        started_at = process_start_time() if exits.job == 0 else time.monotonic()
        config, env = _check(cfg)
        if config.ddp.nproc_per_node and not env.has_local_rank:
            return _run_on_local_workers(config, env, sweep, started_at)
        runtime = _join(config, env, exits)
        config, known = _start_job(config, runtime, sweep)
        if known is not None:
            return known
        from mingpt_ddp.training.run import train_run  # not in the parent of local workers

        files = hydra_utils.hydra_artifacts(cfg)
        typed = hydra_utils.typed_keys()
        judge = reporter() or sweep.report_of(Job.current())
        metrics = train_run(config, runtime, files, signals, started_at, typed, judge)
        return _finish_job(config, runtime, sweep, signals, metrics)
    except JobError:  # from a sweep's local workers, already recorded
        raise
    except Exception as error:
        failure = _fail_job(error, exits, sweep)
    finally:
        # the signal handlers outlive the job and would keep it in memory, as would `failure`
        exits.group = runtime = None
        logs.close()
    gc.collect()
    # outside the handlers: a context would keep the model in memory through its traceback
    raise failure


def _fail_job(error: Exception, exits: ProcessExit, sweep: Sweep) -> JobError:
    """Record that this job of a sweep has failed, and return the error to raise.

    Exit outside of a sweep, and where the other ranks may not have failed in the same way.
    """
    if isinstance(error, UserError):
        if not (hydra_utils.is_multirun() and exits.failed_on_all_ranks(error)):
            exits.user_error(error)
        return sweep.record_failed(Job.current(), str(error), USER_ERROR)
    if not (hydra_utils.is_multirun() and exits.env.world_size == 1):
        exits.failure(error)
    exits.log_traceback("the job failed", error)
    return sweep.record_failed(Job.current(), f"error: {exits.describe(error)}", FAILURE)


def _check(cfg: DictConfig) -> tuple[Config, DistEnv]:
    """Return the configuration of this job and the environment of this process, both checked."""
    config = checked_config(cfg)
    check_machine(config)
    if not hydra_utils.is_multirun():  # a sweep may have complete jobs only, which need no text
        check_text(config)
    env = read_env(config.ddp.local_workers or 1)
    ignored = sorted(key for key in hydra_utils.typed_keys() if key.startswith("sweep."))
    # the workers of a sweep's jobs have the keys of the sweep
    if ignored and not hydra_utils.is_multirun() and not has_parent_launcher():
        log.warning("%s: without -m this is one run, no sweep", ", ".join(ignored))
    return config, env


def _join(config: Config, env: DistEnv, exits: ProcessExit) -> "Runtime":
    """Join the process group of this job."""
    from mingpt_ddp.distributed.runtime import Runtime  # imports torch: report a mistyped key first

    exits.is_symmetric = env.world_size == 1
    runtime = Runtime(config, env, exits.job)
    exits.group = runtime.group
    return runtime


def _start_job(config: Config, runtime: "Runtime", sweep: Sweep) -> tuple[Config, float | None]:
    """Return the configuration with its run.name; and the objective if the job is complete.

    Then, as after an error, this rank has left the process group.

    Raises:
        JobError: the job has failed before, for good; on all ranks.
    """
    group = runtime.group
    try:
        config, known = sweep.start_job(config, group.run_on_rank_zero)
    except JobError:
        runtime.close()
        raise
    if known is not None:
        runtime.close()
        return config, known
    if config.run.resume == "never":
        free_name = partial(group.get_or_set, "run.name", partial(next_free_name, config))
        config = with_run_name(config, group.run_on_rank_zero(free_name))
    directory = run_directory(config)
    group.env.call_on_rank_zero(lambda: report_directories([directory]))
    if not runtime.strategy.is_canonical:  # it has set them, the same in all sweeps
        sweep.use_threads()
    return config, None


def _finish_job(
    config: Config,
    runtime: "Runtime",
    sweep: Sweep,
    signals: SignalHandler,
    metrics: dict[str, float] | None,
) -> float:
    """Leave the process group, record the job and return its objective.

    Args:
        metrics: Metrics of the last evaluation. None if a signal has ended the run.
    """
    value = None
    if metrics is not None:
        objective = objective_named(config.sweep.metric)
        directory = run_directory(config)
        value = runtime.group.run_on_rank_zero(lambda: objective.value(read_result(directory)))
    # possibly too late for this job
    signalled = any(runtime.group.all_gather(signals.signal_name is not None))
    runtime.close()
    if hydra_utils.is_multirun():
        runtime.free_memory()
    return sweep.finish_job(run_directory(config), value, signalled, config.ddp.preempted_exit_code)


def _run_on_local_workers(config: Config, env: DistEnv, sweep: Sweep, started_at: float) -> float:
    """Train on local workers, and return the objective; exit after a signal."""
    local = prepare_local(config, env, sweep, started_at)
    if not isinstance(local, LocalJob):
        return local
    ended = train_on_workers(local.launch, env, started_at)
    value = conclude_local(local, ended, sweep)
    return sweep.finish_job(local.launch.directory, value, ended.signalled, ended.code)
