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

from mingpt_ddp.config import hydra_utils as composed
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.distributed import exit as leave
from mingpt_ddp.distributed import logging as logs
from mingpt_ddp.distributed.env import Place, die_with_parent, find_place, place_or_default
from mingpt_ddp.distributed.signals import Interrupt
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.storage.run_dir import fresh_name, read_result, renamed, run_directory
from mingpt_ddp.storage.status import Status
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
    sys.argv[1:] = composed.flags_first(words)
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is no reason to end
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.raiseExceptions = False  # a line of a log that cannot be written is no reason for ten on the console
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hands us Hydra's errors instead of printing them
    logs.to_console(place_or_default())
    try:
        for word in sys.argv[1:]:  # before Hydra's sweeper saves them
            refuse_credentials(word.partition("=")[0], word)
        directory = str(composed.config_directory())
        hydra.main(version_base="1.3", config_path=directory, config_name="config")(train)()
    except JobError as error:
        sweep.current.hears(error)
    except UserError as error:
        leave.with_user_error(error, place_or_default(), job=0)
    except KeyboardInterrupt:  # while others do the jobs
        sweep.current.close()
        leave.leave("ended by SIGINT; the same command goes on from there", 128 + signal.SIGINT)
    except BrokenPipeError:  # of --help and its like: the reader has had enough
        leave.leave(None, 0)
    except Exception as error:  # `train` lets none pass: it arose while Hydra composed, or in a launcher of jobs
        launcher = type(error).__module__.startswith(("submitit.", "ray."))
        told = RunError(str(error)) if launcher else ConfigError(composed.explain(error))
        if not sweep.current.hopeless:
            sweep.current.close()
            leave.with_user_error(told, place_or_default(), job=0)
    logs.to_console(place_or_default())
    sweep.current.end()
    # Everything is written, and the process group is closed. Interpreters that end in their own time have been seen to
    # abort in a thread of torch's, which an agent takes for a failure.
    leave.leave(None, 0)


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
    begun_at = time.time() if composed.job_number() > 0 else None
    place = place_or_default()
    logs.to_console(place)
    runtime: Runtime | None = None
    alike = True  # what goes wrong now goes wrong on every rank
    interrupt = Interrupt()
    interrupt.leave = lambda number: leave.on_signal(number, place, runtime)
    interrupt.stalled = leave.stalled
    interrupt.pointless = lambda: runtime is not None and runtime.reported_failure(wait_s=0) is not None
    interrupt.install()
    try:
        place = find_place()
        config = composed.typed(cfg, HydraConfig.get())
        _check_urls(config)
        if config.ddp.nproc_per_node and not place.worker:
            return _train_on_workers(config, place)
        from mingpt_ddp.distributed.runtime import Runtime
        from mingpt_ddp.training.run import (
            run,
        )  # and with it torch: a mistyped key is reported before that takes its seconds

        alike = place.world_size == 1
        runtime = Runtime(config, place, composed.job_number())
        if composed.sweeping():
            config, done = sweep.current.joins(config, runtime.first)
            if done is not None:
                runtime.close()
                return done
        if config.run.resume == "never":
            config = renamed(config, runtime.first(partial(runtime.remember, "run.name", partial(fresh_name, config))))
        loss = run(config, runtime, composed.records(cfg), interrupt, begun_at)
        told = any(runtime.gather(interrupt.asked is not None))  # perhaps too late for this job
        runtime.close()
        if loss is not None:
            sweep.current.trained(config)
        another = composed.sweeping() and not sweep.current.through
        if loss is None or (told and another):  # a sweep must not go on with the next job
            sweep.current.breaks_off()
            leave.leave(None, leave.told(place, 0))
        logs.close()
        return loss
    except UserError as error:
        if composed.sweeping() and (alike or (runtime is not None and runtime.all_failed(str(error)))):
            return sweep.current.fails(str(error), leave.USER_ERROR)
        if runtime is not None:
            runtime.report_failure(str(error))
        leave.with_user_error(error, place, composed.job_number())
    except Exception as error:
        if not (composed.sweeping() and place.world_size == 1):
            leave.with_failure(error, place, runtime)
        log.error("the job has failed", exc_info=error)
        return sweep.current.fails(f"error: {type(error).__name__}: {error}", leave.FAILURE)
    finally:
        runtime = None  # until the next job the handlers of signals stay, and would keep it and its memory


def _train_on_workers(config: Config, place: Place) -> float | JobError:
    """Be the parent of this job's workers; only in a sweep does that come to an end here."""
    from mingpt_ddp.distributed.launcher import train_on_workers

    words = composed.worker_words()
    if composed.sweeping():
        config, done = sweep.current.joins(config, lambda work: work())
        if done is not None:
            return done
    if config.run.resume == "never" and place.alone:  # a new directory once, not at every restart
        config = renamed(config, fresh_name(config))
        words.append("run.resume=auto")
    directory = run_directory(config)
    words.append(f'run.name="{directory.relative_to(config.run.root).as_posix()}"')
    if not place.is_main:
        logs.to_console(Place())
        log.info("starting %d ranks; rank 0, at %s:%d, tells how it goes", config.ddp.nproc_per_node, *place.master)
    code, stopped = train_on_workers(config, place, directory, words, main)
    result = read_result(directory)
    ended = result.get("status") in (Status.COMPLETE, Status.PRUNED)
    if code == 0 and ended:
        sweep.current.trained(config)
    if (stopped and not (ended and sweep.current.through)) or (code == 0 and not ended):
        sweep.current.breaks_off()
        leave.leave(None, leave.told(place, code))
    if not composed.sweeping():
        leave.leave(None, code)
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
