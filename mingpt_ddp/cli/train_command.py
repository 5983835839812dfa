"""The train command: compose, validate, start local workers, report an error as one line."""

import contextlib
import gc
import io
import logging
import os
import re
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mingpt_ddp.training.notify import FAILED, notify, notifying
from mingpt_ddp.config import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import (
    CALLER,
    DIRECTORY_FILE,
    DistEnv,
    has_parent_launcher,
    process_start_time,
    read_env,
)
from mingpt_ddp.distributed.exit import (
    FAILURE,
    USER_ERROR,
    ProcessExit,
    die_with_parent,
    exit_process,
)
from mingpt_ddp.distributed.fork_server import start_server
from mingpt_ddp.distributed.launcher import train_on_workers
from mingpt_ddp.distributed.machine import check_machine
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.metrics.trackers.outboxes import check_installed
from mingpt_ddp.storage.run_dir import (
    RunStatus,
    next_free_name,
    read_result,
    run_directory,
    with_run_name,
)
from mingpt_ddp.storage.urls import check_url
from mingpt_ddp.sweeps.sweep import Sweep

log = logging.getLogger(__name__)


def main() -> None:
    """Run main.py and `python -m mingpt_ddp`; always exit through os._exit."""
    # by default a third of the time in which torch is imported goes into collections
    gc.set_threshold(20_000)
    caller = os.environ.pop(CALLER, None)
    if caller or has_parent_launcher():
        die_with_parent(caller)
    if os.getpid() == 1:  # in a container: the kernel drops signals without a handler
        signal.signal(signal.SIGTERM, lambda number, _: exit_process(None, 128 + number))
    sweep = Sweep()
    exits = ProcessExit()
    try:
        if text := hydra_utils.answer(sys.argv[1:]):
            print(text)
            exit_process(None, 0)
        prepare(exits.env)
        forks = any(re.match(r"ddp\.nproc_per_node=[1-9g]", word) for word in sys.argv)
        if exits.env.is_standalone and forks and "ddp.launcher=spawn" not in sys.argv:
            start_server()  # its imports take longer than composing the configuration
        with sweep.active():
            directory = str(hydra_utils.config_directory())
            hydra.main(version_base="1.3", config_path=directory, config_name="config")(train)()
    except JobError as error:
        if sweep.uses_external_launcher:  # otherwise already recorded
            sweep.failed.append(error.args[0])
    except UserError as error:
        exits.user_error(error)
    except KeyboardInterrupt:  # while other processes run the jobs
        exit_process("interrupted (SIGINT); rerun the same command to resume", 128 + signal.SIGINT)
    except BrokenPipeError:  # stdout was closed early, e.g. --help piped into head
        exit_process(None, 0)
    except Exception as error:  # from Hydra or an external launcher; `train` raises none
        if sweep.done or not sweep.failed:  # otherwise from Optuna, which has no best trial
            if type(error).__module__.startswith(("submitit.", "ray.")):
                exits.user_error(RunError(str(error)))
            exits.user_error(ConfigError(hydra_utils.explain(error)))
    logs.to_console(exits.env)
    sweep.finish()
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
    # never crash on characters that the terminal cannot encode
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.raiseExceptions = False  # no traceback when a log record cannot be written
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    logs.to_console(env)
    for word in sys.argv[1:]:
        refuse_credentials(word.partition("=")[0], word)
    hydra_utils.check_words(words)


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
    try:
        return _run_job(cfg, sweep, signals)
    except JobError:  # from a sweep's local workers, already recorded
        raise
    except UserError as error:
        if not (hydra_utils.is_multirun() and exits.failed_on_all_ranks(error)):
            exits.user_error(error)
        failure = sweep.record_failed(str(error), USER_ERROR)
    except Exception as error:
        if not (hydra_utils.is_multirun() and exits.env.world_size == 1):
            exits.failure(error)
        log.error("the job failed", exc_info=error)
        failure = sweep.record_failed(f"error: {type(error).__name__}: {error}", FAILURE)
    finally:
        exits.group = None  # the signal handlers outlive the job and would keep it in memory
        logs.close()
    gc.collect()
    # outside the handlers: a context would keep the model in memory through its traceback
    raise failure


def _run_job(cfg: DictConfig, sweep: Sweep, signals: SignalHandler) -> float:
    started_at = None  # at process start
    if hydra_utils.job_number() > 0:
        started_at = time.monotonic()
    config = checked_config(cfg)
    check_machine(config)
    env = read_env(config.ddp.local_workers or 1)
    if config.ddp.nproc_per_node and not env.has_local_rank:
        return _run_on_local_workers(config, env, sweep, started_at or process_start_time())
    from mingpt_ddp.distributed.runtime import Runtime  # imports torch: report a mistyped key first
    from mingpt_ddp.training.run import run

    signals.exits.is_symmetric = env.world_size == 1
    runtime = Runtime(config, env, hydra_utils.job_number())
    group = signals.exits.group = runtime.group
    config, known = sweep.start_job(config, group.run_on_rank_zero)
    if known is not None:
        runtime.close()
        return known
    if config.run.resume == "never":
        free_name = partial(group.get_or_set, "run.name", partial(next_free_name, config))
        config = with_run_name(config, group.run_on_rank_zero(free_name))
    env.call_on_rank_zero(lambda: _report_directory(run_directory(config)))
    files = hydra_utils.hydra_artifacts(cfg)
    typed = hydra_utils.typed_keys()
    metric = sweep.objective.metric
    with notifying(config, env):
        value = run(config, runtime, files, signals, started_at, typed, metric)
    # possibly too late for this job
    signalled = any(group.all_gather(signals.signal_name is not None))
    runtime.close()
    return sweep.finish_job(run_directory(config), value, signalled, config.ddp.preempted_exit_code)


def _report_directory(directory: Path) -> None:
    """Write the path of the run directory where `mingpt_ddp.train` reads it."""
    with contextlib.suppress(KeyError, OSError):  # not called by it, or it has ended
        Path(os.environ[DIRECTORY_FILE]).write_text(str(directory.absolute()))


def checked_config(cfg: DictConfig) -> Config:
    """Return the configuration that Hydra has composed, typed, with the number of workers.

    Raises:
        ConfigError, CodeError: a key, a value or a user's file is invalid.
    """
    config = hydra_utils.to_config(cfg, HydraConfig.get(), HydraConfig.get().overrides.task)
    if config.ddp.nproc_per_node == "gpu":
        count = _count_gpus(config.model.devices)
        config = replace(config, ddp=replace(config.ddp, nproc_per_node=count))
    _check_urls(config)
    check_installed(config)
    return config


def _count_gpus(per_worker: int) -> int:
    import torch

    count = torch.cuda.device_count()  # asks the driver: does not initialize CUDA
    if count == 0:
        raise ConfigError(
            "ddp.nproc_per_node=gpu, but torch sees no GPU here; give a number of workers"
        )
    return max(1, count // per_worker)


def _run_on_local_workers(config: Config, env: DistEnv, sweep: Sweep, started_at: float) -> float:
    overrides = hydra_utils.worker_overrides()
    config, known = sweep.start_job(config, lambda work: work())
    if known is not None:
        return known
    if config.run.resume == "never" and env.is_standalone:  # one new directory for all restarts
        config = with_run_name(config, next_free_name(config))
        overrides.append("run.resume=auto")
    directory = run_directory(config)
    overrides.append(f'run.name="{directory.relative_to(config.run.root).as_posix()}"')
    code, signalled = train_on_workers(config, env, directory, overrides, started_at)
    if code not in (0, config.ddp.preempted_exit_code) and not signalled:
        env.call_on_rank_zero(lambda: notify(config, FAILED))
        if not hydra_utils.is_multirun():
            exit_process(None, code)
        raise sweep.record_failed(f"job error: its workers exited with code {code}", code)
    result = read_result(directory)
    ended = code == 0 and result.get("status") in (RunStatus.COMPLETE, RunStatus.PRUNED)
    value = sweep.objective.value(result) if ended else None
    return sweep.finish_job(directory, value, signalled, code)


def _check_urls(config: Config) -> None:
    """Raise a ConfigError for a URL that no installed library can open."""
    path = getattr(config.data, "path", None)
    if path and not getattr(config.data, "reader", None):
        check_url(path, "data.path")
    if config.snapshot.path:
        check_url(config.snapshot.path, "snapshot.path", writable=True)
    if config.snapshot.fallback_path:
        check_url(config.snapshot.fallback_path, "snapshot.fallback_path", writable=True)
    check_url(config.run.resume, "run.resume")
    if config.run.init_from is not None:
        check_url(config.run.init_from, "run.init_from")
