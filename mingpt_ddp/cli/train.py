"""From the command line to the run: compose, check, start local workers where asked, and one line for every error."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mingpt_ddp.config import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import DistEnv, die_with_parent, read_env, read_env_or_default
from mingpt_ddp.distributed.exit import (
    FAILURE,
    USER_ERROR,
    exit_failure,
    exit_hang,
    exit_on_signal,
    exit_process,
    exit_user_error,
    signal_exit_code,
)
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.storage.run_dir import RunStatus, next_free_name, read_result, run_directory, with_run_name
from mingpt_ddp.storage.storage import check_url
from mingpt_ddp.sweeps import sweep

if TYPE_CHECKING:
    from mingpt_ddp.distributed.runtime import Runtime

log = logging.getLogger(__name__)


def main() -> None:
    """The entry point of main.py and of `python -m mingpt_ddp`."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is an agent
        die_with_parent()
    # torch.distributed.launch passes the local rank as a flag that Hydra does not know; the environment has it as well.
    words = [word for word in sys.argv[1:] if not re.match(r"--local[-_]rank\b", word)]
    sys.argv[1:] = hydra_utils.reorder_argv(words)
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is no reason to end
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.raiseExceptions = False  # a line of a log that cannot be written is no reason for ten on the console
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hands us Hydra's errors instead of printing them
    logs.to_console(read_env_or_default())
    try:
        for word in sys.argv[1:]:  # before Hydra's sweeper saves them
            refuse_credentials(word.partition("=")[0], word)
        directory = str(hydra_utils.config_directory())
        hydra.main(version_base="1.3", config_path=directory, config_name="config")(train)()
    except JobError as error:
        sweep.current.hears(error)
    except UserError as error:
        exit_user_error(error, read_env_or_default(), job=0)
    except KeyboardInterrupt:  # while others do the jobs
        sweep.current.close()
        exit_process("ended by SIGINT; the same command goes on from there", 128 + signal.SIGINT)
    except BrokenPipeError:  # of --help and its like: the reader has had enough
        exit_process(None, 0)
    except Exception as error:  # `train` lets none pass: it arose while Hydra composed, or in a launcher of jobs
        launcher = type(error).__module__.startswith(("submitit.", "ray."))
        told = RunError(str(error)) if launcher else ConfigError(hydra_utils.explain(error))
        if not sweep.current.hopeless:
            sweep.current.close()
            exit_user_error(told, read_env_or_default(), job=0)
    logs.to_console(read_env_or_default())
    sweep.current.end()
    # Everything is written, and the process group is closed. Interpreters that end in their own time have been seen to
    # abort in a thread of torch's, which an agent takes for a failure.
    exit_process(None, 0)


def train(cfg: DictConfig) -> float:
    """One job: everything that Hydra composed, to its validation loss.

    Raises:
        JobError: it has failed and is one of a sweep, which goes on.
    """
    outcome = _attempt(cfg)
    if isinstance(outcome, JobError):
        logs.close()
        gc.collect()
        raise outcome  # from here, where the traceback does not keep the model alive
    return outcome


def _attempt(cfg: DictConfig) -> float | JobError:
    begun_at = time.time() if hydra_utils.job_number() > 0 else None
    env = read_env_or_default()
    logs.to_console(env)
    runtime: Runtime | None = None
    alike = True  # what goes wrong now goes wrong on every rank
    interrupt = SignalHandler()
    interrupt.exit = lambda number: exit_on_signal(number, env, runtime)
    interrupt.on_hang = exit_hang
    interrupt.peer_failed = lambda: runtime is not None and runtime.group.reported_failure(wait_s=0) is not None
    interrupt.install()
    try:
        env = read_env()
        config = hydra_utils.to_config(cfg, HydraConfig.get())
        _check_urls(config)
        if config.ddp.nproc_per_node and not env.has_local_rank:
            return _train_on_workers(config, env)
        from mingpt_ddp.distributed.runtime import Runtime
        from mingpt_ddp.training.run import (
            run,
        )  # and with it torch: a mistyped key is reported before that takes its seconds

        alike = env.world_size == 1
        runtime = Runtime(config, env, hydra_utils.job_number())
        if hydra_utils.is_multirun():
            config, done = sweep.current.joins(config, runtime.group.run_on_rank_zero)
            if done is not None:
                runtime.close()
                return done
        if config.run.resume == "never":
            config = with_run_name(
                config,
                runtime.group.run_on_rank_zero(
                    partial(runtime.group.get_or_set, "run.name", partial(next_free_name, config))
                ),
            )
        loss = run(config, runtime, hydra_utils.hydra_artifacts(cfg), interrupt, begun_at)
        told = any(runtime.group.all_gather(interrupt.signal_name is not None))  # perhaps too late for this job
        runtime.close()
        if loss is not None:
            sweep.current.trained(config)
        another = hydra_utils.is_multirun() and not sweep.current.through
        if loss is None or (told and another):  # a sweep must not go on with the next job
            sweep.current.breaks_off()
            exit_process(None, signal_exit_code(env, 0))
        logs.close()
        return loss
    except UserError as error:
        if hydra_utils.is_multirun() and (alike or (runtime is not None and runtime.group.have_all_failed(str(error)))):
            return sweep.current.fails(str(error), USER_ERROR)
        if runtime is not None:
            runtime.group.report_failure(str(error))
        exit_user_error(error, env, hydra_utils.job_number())
    except Exception as error:
        if not (hydra_utils.is_multirun() and env.world_size == 1):
            exit_failure(error, env, runtime)
        log.error("the job has failed", exc_info=error)
        return sweep.current.fails(f"error: {type(error).__name__}: {error}", FAILURE)
    finally:
        runtime = None  # until the next job the handlers of signals stay, and would keep it and its memory


def _train_on_workers(config: Config, env: DistEnv) -> float | JobError:
    """Be the parent of this job's workers; only in a sweep does that come to an end here."""
    from mingpt_ddp.distributed.launcher import train_on_workers

    words = hydra_utils.worker_overrides()
    if hydra_utils.is_multirun():
        config, done = sweep.current.joins(config, lambda work: work())
        if done is not None:
            return done
    if config.run.resume == "never" and env.is_standalone:  # a new directory once, not at every restart
        config = with_run_name(config, next_free_name(config))
        words.append("run.resume=auto")
    directory = run_directory(config)
    words.append(f'run.name="{directory.relative_to(config.run.root).as_posix()}"')
    if not env.is_rank_zero:
        logs.to_console(DistEnv())
        log.info(
            "starting %d ranks; rank 0, at %s:%d, tells how it goes", config.ddp.nproc_per_node, *env.master_address
        )
    code, stopped = train_on_workers(config, env, directory, words, main)
    result = read_result(directory)
    ended = result.get("status") in (RunStatus.COMPLETE, RunStatus.PRUNED)
    if code == 0 and ended:
        sweep.current.trained(config)
    if (stopped and not (ended and sweep.current.through)) or (code == 0 and not ended):
        sweep.current.breaks_off()
        exit_process(None, signal_exit_code(env, code))
    if not hydra_utils.is_multirun():
        exit_process(None, code)
    if code != 0:
        return sweep.current.fails(f"job error: its workers ended with exit code {code}", code)
    return float(result["val_loss"])


def _check_urls(config: Config) -> None:
    saved = {f"snapshot.{key}": getattr(config.snapshot, key) for key in ("path", "fallback_path")}
    urls = saved if config.data.reader else {"data.path": config.data.path, **saved}
    if config.run.resume not in ("auto", "never"):
        urls["run.resume"] = config.run.resume
    for key, url in urls.items():
        if url is not None and not url.startswith("builtin:"):
            check_url(url, key, writable=key in saved)
