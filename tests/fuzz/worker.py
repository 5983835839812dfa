"""Run cases one after another in one process, from the entry point of each command to its exit.

    python tests/fuzz/worker.py DIRECTORY

reads one line [seed, number] for each case, and prints one line of JSON with the outcome. The
process imports torch and then forks a child, which runs up to CASES_PER_PROCESS cases. If a case
ends the child, by a timeout or a crash, the process forks a new one. No case trains: a command that
is not refused ends once it has locked the run directory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fuzz.cases import Case, draw  # noqa: E402
from fuzz.world import STEPS, World  # noqa: E402
from one_process import reset  # noqa: E402

CASES_PER_PROCESS = 200
BATCH_DONE = 3  # exit code of a process that has run CASES_PER_PROCESS cases
# A case that takes longer is ended. driver.py has a lower limit for cases that end by themselves.
HANG_S = 120
MARGIN_S = 5  # SIGALRM comes this long after HANG_S, if the first timeout had no effect
# A case gets a MemoryError if it allocates more than this, in addition to torch's memory.
MAX_EXTRA_BYTES = 6 << 30
COMMANDS = ("train", "sample", "evaluate", "snapshots", "report", "plan", "again")


class AcceptedError(SystemExit):
    """Raised where an accepted command would begin to train."""


def accept(*args: Any, **kwargs: Any) -> NoReturn:
    raise AcceptedError(0)


def leave(code: int) -> NoReturn:
    raise SystemExit(code)


def replace_attribute(name: str, value: Any) -> Any:
    """Replace the attribute with this dotted name. Return its previous value."""
    module, _, last = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        owner = getattr(
            importlib.import_module(module.rpartition(".")[0]), module.rpartition(".")[2]
        )
    before = getattr(owner, last)
    setattr(owner, last, value)
    return before


def stop_before_training() -> None:
    """End commands where they would begin to train or start other processes.

    Sampling generates only a few tokens.
    """
    import torch

    for name in (
        "training.run.build",
        "distributed.launch.launcher.run_with_restarts",
        "study.planning.measured.measure",
    ):
        replace_attribute(f"mingpt_ddp.{name}", accept)
    for name in (
        "cli.commands.train.start_server",
        "distributed.launch.launcher.start_server",
        "cli.train_job.die_with_parent",
    ):
        replace_attribute(f"mingpt_ddp.{name}", lambda *args: None)
    generate = replace_attribute(
        "mingpt_ddp.inference.generate.generate",
        lambda model, tokens, count, *rest: generate(model, tokens[:4], min(count, 4), *rest),
    )
    for name in (
        "storage.remote.remote.OPERATION_DEADLINE_S",
        "storage.run_directory.LOCK_WAIT_S",
        "training.start.stages.LOCK_WAIT_S",
    ):
        replace_attribute(f"mingpt_ddp.{name}", 1.0)
    # This method would compose the whole configuration a second time.
    replace_attribute("hydra._internal.hydra.Hydra.get_mode", lambda *args, **kwargs: None)
    os._exit, os.execve = leave, accept
    torch.use_deterministic_algorithms(False)  # the first call imports modules
    from hydra import compose, initialize_config_dir

    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory

    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        compose("config", ["optimizer.lr=1"])


exit_now = os._exit


def entry(case: Case) -> Any:
    """Set sys.argv for a command. Return the function with which the command begins."""
    name, *first = case.command.split()
    sys.argv = [f"{name}.py", *first, *case.words]
    sys.orig_argv = [sys.executable, *sys.argv]
    return importlib.import_module(f"mingpt_ddp.cli.commands.{name}").main


def memory(name: str) -> int:
    """Return VmRSS or its peak VmHWM, in MiB. The peak counts since it was last cleared."""
    return next(
        int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith(name)
    )


def waited() -> float:
    """Return the seconds in which this thread was ready to run but got no core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def run(case: Case, outputs: list[Path]) -> dict[str, Any]:
    """Run a command. Return its exit code, and the time and memory it took."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, begin, cpu = memory("VmRSS"), time.perf_counter() - waited(), time.process_time()
    for target, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(os.dup(n), "wb", 0), write_through=True) for n in (1, 2)
    )
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=2)
    signal.alarm(HANG_S + MARGIN_S)
    code, accepted = 0, False
    with warnings.catch_warnings():  # so that each case shows its warnings again
        try:
            entry(case)()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
            accepted = isinstance(left, AcceptedError)
        except BaseException:
            traceback.print_exc()
            code = 1
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.close()
    sys.stderr.close()
    seconds, megabytes = round(time.perf_counter() - waited() - begin, 1), memory("VmHWM") - before
    cpu = round(time.process_time() - cpu, 2)
    return {
        "code": code,
        "accepted": accepted,
        "seconds": seconds,
        "cpu": cpu,
        "megabytes": megabytes,
    }


def serve(world: World, requests: io.TextIOWrapper, answers: io.TextIOWrapper) -> int:
    """Run requested cases, at most CASES_PER_PROCESS. Return the exit code of this process."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_EXTRA_BYTES, used + MAX_EXTRA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    outputs = [world.template.with_name(name) for name in ("stdout", "stderr")]
    for _ in range(CASES_PER_PROCESS):
        if not (line := requests.readline()):
            return 0
        case = draw(*json.loads(line))
        reset(world.environ)
        world.restore()
        for name, *arguments in case.steps:
            STEPS[name](*arguments)
        before = world.listing()
        answer = run(case, outputs)
        os.chdir(world.cwd)
        after = world.listing()
        changed = [
            name for name in sorted({*before, *after}) if before.get(name) != after.get(name)
        ]
        print(json.dumps({**answer, "changed": changed}), file=answers, flush=True)
    return BATCH_DONE


def forked(work: Callable[[], int]) -> int:
    """Call a function in a forked child. Kill the processes it has left; return its exit code."""
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        try:
            exit_now(work())
        finally:
            traceback.print_exc()
            exit_now(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return status


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for name in (
        *(f"cli.commands.{name}" for name in COMMANDS),
        "training.run",
        "study.planning.plan",
        "inference.generate",
    ):
        importlib.import_module(f"mingpt_ddp.{name}")
    stop_before_training()
    world = World(Path(sys.argv[1]))
    # The files are made in a child, since the threads of libraries would not survive the next fork.
    forked(lambda: world.make() or 0)
    gc.freeze()
    while status := forked(lambda: serve(world, os.fdopen(os.dup(0)), answers)):
        if status != BATCH_DONE:
            ended = {
                "code": status,
                "accepted": False,
                "seconds": HANG_S,
                "megabytes": 0,
                "changed": [],
            }
            print(json.dumps(ended), file=answers, flush=True)


if __name__ == "__main__":
    main()
