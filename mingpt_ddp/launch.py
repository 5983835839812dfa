"""From the command line to the run: compose, check, start local workers where asked, and one line for every error."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp import logs
from mingpt_ddp.config import Config, from_mapping, plain, suggest
from mingpt_ddp.errors import AwayError, ConfigError, UserError
from mingpt_ddp.interrupt import Interrupt
from mingpt_ddp.place import Place, die_with_parent, find_place
from mingpt_ddp.registry import blaming, run_code
from mingpt_ddp.schema import closest, refuse_credentials
from mingpt_ddp.storage import check_url

if TYPE_CHECKING:
    from mingpt_ddp.runtime import Runtime

log = logging.getLogger(__name__)

USER_ERROR, FAILURE = 2, 1  # exit codes
TRY_AGAIN = 75  # of a worker to its agent: EX_TEMPFAIL of <sysexits.h>
VICTIM_WAIT_S = 1.0  # how long a rank that lost the others waits for the reason
STORE_S = 5.0  # how long the job's store may take to answer
AGENT_S = 1.0  # within which an elastic agent notices that one worker is gone and ends the others


def main() -> None:
    """The entry point of main.py and of `python -m mingpt_ddp`."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is an elastic agent
        die_with_parent()
    # torch.distributed.launch passes the local rank as a flag that Hydra does not know; the environment has it as well.
    sys.argv = [arg for arg in sys.argv if not re.match(r"--local[-_]rank\b", arg)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hands us Hydra's errors instead of printing them
    try:
        for word in sys.argv[1:]:  # before Hydra's sweeper saves them
            refuse_credentials(word.partition("=")[0], word)
        hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="config")(train)()
    except UserError as error:
        _leave_with_user_error(error, _place_or_default())
    except BrokenPipeError:  # of --help and its like: the reader has had enough
        _leave(None, 0)
    except Exception as error:  # `train` lets none pass: what arrives here went wrong while Hydra composed
        _leave_with_user_error(ConfigError(explain(error)), _place_or_default())
    # Everything is written, and the process group is closed. Interpreters that end in their own time have been seen to
    # abort in a thread of torch's, which an agent takes for a failure.
    _leave(None, 0)


def config_directory() -> Path:
    """conf/ of the checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def train(cfg: DictConfig) -> float:
    """One job: everything that Hydra composed, to its validation loss."""
    place = _place_or_default()
    logs.to_console(place)
    runtime: Runtime | None = None
    interrupt = Interrupt()
    interrupt.leave = lambda number: _leave_on_signal(number, place, runtime)
    interrupt.stalled = _leave_stalled
    interrupt.pointless = lambda: runtime is not None and runtime.reported_failure(wait_s=0) is not None
    interrupt.install()
    try:
        place = find_place()
        with blaming():
            config = from_mapping(run_code(plain(cfg), _search_path()))
        _check_urls(config)
        if config.ddp.nproc_per_node is not None and "RANK" not in os.environ:
            _run_agent(config)
        from mingpt_ddp.run import run  # imports torch: a mistyped key is told before that
        from mingpt_ddp.runtime import Runtime

        runtime = Runtime(config, place, _job_number())
        loss = run(config, runtime, _hydra_files(cfg), _job_directory(), interrupt)
        runtime.close()
        if loss is None:  # preempted: a sweep must not go on with the next job
            _leave(None, 0)
        logs.close()
        return loss
    except UserError as error:
        if runtime is not None:
            runtime.report_failure(str(error))
        _leave_with_user_error(error, place)
    except SystemExit:
        raise
    except BaseException as error:
        _leave_with_failure(error, place, runtime)


def _check_urls(config: Config) -> None:
    saved = {f"snapshot.{key}": getattr(config.snapshot, key) for key in ("path", "fallback_path")}
    urls = saved if config.data.reader else {"data.path": config.data.path, **saved}
    if config.run.resume not in ("auto", "never"):
        urls["run.resume"] = config.run.resume
    for key, url in urls.items():
        if url is not None and not url.startswith("builtin:"):
            check_url(url, key, writable=key in saved)


def _search_path() -> list[Path]:
    """The directories in which Hydra looks for YAML files."""
    sources = HydraConfig.get().runtime.config_sources
    return [Path(source.path).absolute() for source in sources if source.schema == "file"]


def _run_agent(config: Config) -> NoReturn:
    """Be the elastic agent of `ddp.nproc_per_node` local workers, each of which runs this same command."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("ddp.nproc_per_node cannot start a sweep; use torchrun --nproc_per_node=N main.py -m ...")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mingpt_ddp.loader import plan_batches
    from mingpt_ddp.rundir import PREEMPTED, fresh_directory, read_status, run_directory
    from mingpt_ddp.runtime import choose_device

    workers = config.ddp.nproc_per_node
    assert workers is not None
    choose_device(config.trainer, config.ddp, Place(local_rank=workers - 1))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    package_home = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")]))
    plan_batches(config.trainer, workers)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the workers tell what went wrong
    words, directory = sys.argv[1:], run_directory(config)
    if config.run.resume == "never":  # once, not at every restart
        directory = fresh_directory(directory)
        words += [f"run.name={directory.name}", "run.resume=auto"]
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # that the agent hands on to its workers
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
    code = FAILURE
    for restart in range(config.ddp.max_restarts + 1):
        if restart:
            log.warning("restart %d of %d", restart, config.ddp.max_restarts)
        launch = LaunchConfig(1, 1, workers, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
        launch.max_restarts = 0
        launch.signals_to_handle = signals
        launch.shutdown_timeout = round(config.snapshot.grace_seconds) + 5  # seconds; older versions of torch have 30
        try:
            elastic_launch(launch, sys.executable)("-m", "mingpt_ddp", *words)
            sys.exit(0)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:  # it could not tell itself
                log.error("error: rank %d was ended by %s", rank, signal.Signals(-failure.exitcode).name)
            code = USER_ERROR if failure.exitcode in (USER_ERROR, TRY_AGAIN) else FAILURE
            if failure.exitcode == USER_ERROR:  # would come again
                break
        except SignalException as stop:
            preempted = read_status(directory) == PREEMPTED
            sys.exit(0 if preempted else 128 + stop.sigval)
    sys.exit(code)


def _hydra_files(cfg: DictConfig) -> dict[str, str]:
    hydra_config: Any = HydraConfig.instance().cfg
    return {
        "config.yaml": OmegaConf.to_yaml(cfg),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(hydra_config, ["hydra"])),
        "overrides.yaml": OmegaConf.to_yaml(hydra_config.hydra.overrides.task),
    }


def _job_number() -> int:
    """Counts the jobs of a sweep, in which all ranks do the same job at the same time."""
    sweeping = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return int(HydraConfig.get().job.num) if sweeping else 0


def _job_directory() -> str | None:
    """In a sweep, a directory named after the job's own overrides: readable, and different for different jobs."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    overrides = ",".join(sorted(HydraConfig.get().overrides.task))
    return f"{re.sub(r'[^A-Za-z0-9._=,-]+', '_', overrides)[:100]}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


# Errors. The last line that a worker prints names the rank and what went wrong.


def explain(error: Exception) -> str:
    """Hydra's own errors as one line, with the key that was probably meant and without what may be a password."""
    text = str(error)
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        key = override[1].split("@")[0]
        return f"{key} is not a key{_suggest(key, error.__cause__)}"
    if isinstance(error, OverrideParseException):
        text = f"cannot read {error.override!r}, quote special characters twice as in 'key=\"a=b\"': {text}"
    elif not isinstance(error, (HydraException, OmegaConfBaseException)):
        text = f"the command line or a configuration file cannot be understood ({type(error).__name__}: {text})"
    text = re.sub(r"^In '[^']*': |Config search path:.*|See https://hydra.cc.*", "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"//[^/\s]*@", "//...@", text).split())[:400]


def _suggest(key: str, cause: BaseException | None) -> str:
    """What was meant, among the keys of the chosen YAML file if it is one of those: they may be a user's own."""
    group, _, name = key.rpartition(".")
    node = getattr(cause, "parent_node", None)
    meant = closest(name, map(str, node)) if group and isinstance(node, DictConfig) else None
    return f"; did you mean {group}.{meant}?" if meant else suggest(key)


def _place_or_default() -> Place:
    try:
        return find_place()
    except UserError:
        return Place()


def _leave_with_user_error(error: UserError, place: Place) -> NoReturn:
    """All ranks have the same error, or one alone: it is told once, by rank 0 if that has it, and not at restarts."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not logging.getLogger(logs.ROOT).handlers:
        logs.to_console(place)
    if place.agent and not place.is_main:
        time.sleep(AGENT_S)
    if isinstance(error, AwayError):  # every rank has met it, and the next attempt may not
        _leave(str(error) if place.is_main else None, TRY_AGAIN if place.agent else USER_ERROR)
    _leave(str(error) if _is_news(str(error), place) else None, USER_ERROR)


def _is_news(message: str, place: Place) -> bool:
    if not place.agent:
        return True
    from mingpt_ddp.rendezvous import connect, tell_once, within

    try:
        return within(STORE_S, lambda: tell_once(connect(place, _job_number(), timeout_s=STORE_S), message))
    except Exception:  # without the agent's store nobody can know: better twice than never
        return True


def _leave_with_failure(error: BaseException, place: Place, runtime: Runtime | None) -> NoReturn:
    """The rank that failed reports why; a rank that only lost its peers waits for that report and repeats it."""
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    if not _lost_peers(error):
        if runtime is not None:
            runtime.report_failure(summary)
        _tell_agent(error)
        log.error("rank %d failed", place.rank, exc_info=error)
        _leave(f"error: rank {place.rank}: {summary}", FAILURE)
    log.info("rank %d lost its peers", place.rank, exc_info=error, extra={"file_only": True})
    reason = runtime.reported_failure(VICTIM_WAIT_S) if runtime is not None else None
    log.error("error: %s", reason or f"rank {place.rank} lost another rank: {summary[:200]}")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.agent:
        time.sleep(AGENT_S)  # the agent blames the first to go
    _leave(None, FAILURE)


def _leave_stalled(reason: str) -> None:
    """The others have a moment to tell it as well: the agent ends all when the first has gone."""
    log.error("error: %s", reason)
    time.sleep(AGENT_S)
    _leave(None, FAILURE)


def _leave_on_signal(number: int, place: Place, runtime: Runtime | None) -> None:
    """An agent ends the ranks that are left when one has failed: they tell why, as far as they know."""
    try:
        reason = runtime.reported_failure(VICTIM_WAIT_S) if runtime is not None and place.world_size > 1 else None
        if reason:
            log.error("error: %s", reason)
        elif place.is_main:
            log.error("ended by %s; the same command continues from the last snapshot", signal.Signals(number).name)
    finally:
        os._exit(128 + number)


def _lost_peers(error: BaseException) -> bool:
    """Whether the error came from the connection to other ranks rather than from this one."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _tell_agent(error: BaseException) -> None:
    """Leave the error where torchrun's summary finds it."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


def _leave(message: str | None, code: int) -> NoReturn:
    """End at once: neither Hydra's launcher may go on with the next job, nor a process group wait for its members."""
    if message is not None:
        log.error(message)
    logs.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code)
