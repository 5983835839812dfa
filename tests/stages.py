"""Hold the processes of a run at a stage, so that a test can kill or stop them there.

A local run reaches the stages in this order:

    imports     the fork server has begun to import, and no process has been forked
    hosts       the store's process has begun, but does not answer ranks yet
    forked      a rank's process has begun, and done nothing else
    connects    a rank is about to connect to the store
    joined      a rank has left the rendezvous, and has not yet joined torch's process group
    first step  a rank has done the forward and backward passes of its first step
    saving      a rank is about to write the files of a snapshot
    complete    the result is written, and the ranks are still a process group
    exit        the process group has been destroyed, and the ranks are about to end
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holding import SETTINGS
from launching import (
    PATIENCE_S,
    WITH_TOY,
    Job,
    UnforkedJob,
    children,
    is_running,
    python_main,
    read,
    torchrun,
    wait_for,
)
from pause_points import PausedJob, patches
from random_faults import processes_in, tensors

TIMEOUT_S = 6
GRACE_S = 2
# Environment variable: the path of a file to which each case adds a line of JSON.
REPORT = "STAGES_REPORT"

TEXT = [*SETTINGS, "snapshot.every_steps=4"]
# A task of samples, which loader processes read. Unlike the digits, it needs no further imports.
TOY = [
    WITH_TOY,
    "experiment=toy",
    "data.num_workers=1",
    "trainer.max_epochs=null",
    "trainer.max_steps=24",
    "trainer.eval_every=12",
    "trainer.log_every=1",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "snapshot.every_steps=4",
    "run.name=run",
]
LIMITS = [f"ddp.timeout_s={TIMEOUT_S}", f"snapshot.grace_seconds={GRACE_S}"]
COMMANDS = {
    "forkserver": [*python_main(), "ddp.nproc_per_node=2"],
    "spawn": [*python_main(), "ddp.nproc_per_node=2", "ddp.launcher=spawn"],
    "torchrun": torchrun(2, "--max-restarts=3"),
}
# As for a user, the launcher and its fork server import torch themselves, which takes seconds.
COMMANDS["new processes"] = COMMANDS["forkserver"]

PATCHES = """
import functools

def reach(stage):
    if stage == "<stage>":
        pause(stage)

def before(owner, name, stage):
    original = getattr(owner, name)
    @functools.wraps(original)
    def paused(*arguments, **named):
        reach(stage)
        return original(*arguments, **named)
    setattr(owner, name, paused)

def after(owner, name, stage):
    original = getattr(owner, name)
    @functools.wraps(original)
    def paused(*arguments, **named):
        result = original(*arguments, **named)
        reach(stage)
        return result
    setattr(owner, name, paused)

def patch_preload(preload):
    reach("imports")

def patch_store(local_store):
    original = local_store._host
    @functools.wraps(original)
    def host(*arguments):
        if not (HERE / "store.0").exists():
            (HERE / "store.0").write_text(str(os.getpid()))
        reach("hosts")
        original(*arguments)
    local_store._host = host

def patch_workers(workers):
    original = workers.run_worker
    @functools.wraps(original)
    def run_worker(parent, environ, *arguments):
        os.environ["RANK"] = environ["RANK"]
        reach("forked")
        original(parent, environ, *arguments)
    workers.run_worker = run_worker

def patch_launcher(launcher):
    # It may have imported the function already. Processes are started by the function's name.
    launcher.run_worker = sys.modules["mingpt_ddp.distributed.launch.workers"].run_worker

def patch_command(train_job):
    if "TORCHELASTIC_RUN_ID" in os.environ:
        before(train_job, "main", "forked")

def patch_group(process_group):
    before(process_group, "join", "connects")
    after(process_group, "join", "joined")
    close = process_group.ProcessGroup.close
    def paused(self):
        if self.world_size > 1:
            reach("complete")
        close(self)
        if self.world_size > 1:
            reach("exit")
    process_group.ProcessGroup.close = paused

PATCHES["mingpt_ddp.distributed.launch.preload"] = patch_preload
PATCHES["mingpt_ddp.distributed.launch.local_store"] = patch_store
PATCHES["mingpt_ddp.distributed.launch.workers"] = patch_workers
PATCHES["mingpt_ddp.distributed.launch.launcher"] = patch_launcher
PATCHES["mingpt_ddp.cli.train_job"] = patch_command
PATCHES["mingpt_ddp.distributed.group.process_group"] = patch_group
PATCHES["mingpt_ddp.training.trainer"] = lambda module: before(
    module.Trainer, "_send_flags", "first step"
)
PATCHES["mingpt_ddp.snapshots.write.store"] = lambda module: before(
    module.SnapshotStore, "write_files", "saving"
)
"""
STAGES_BEFORE_RANKS = ("imports", "hosts")
STAGES_AFTER_RESULT = ("complete", "exit")


@dataclass(frozen=True)
class Case:
    """A signal that is sent to a process at a stage of its run."""

    process: str  # "launcher", "fork server", "store", "rank 0", "ranks" or "loader of rank 0"
    stage: str
    # "KILL" or "STOP" is sent to the process. For "TERM" or "INT INT", the process is stopped, and
    # these signals are sent to the launcher.
    signal: str
    # Regular expression for the error line that names the process, or "" if no line is expected.
    expectation: str = ""
    launcher: str = "forkserver"

    def __str__(self) -> str:
        words = [f"{self.signal} {self.process}", self.stage]
        if self.launcher != "forkserver":
            words.append(self.launcher)
        return ", ".join(words)

    @property
    def settings(self) -> list[str]:
        """Settings of the run. Only a task of samples has loader processes."""
        return TOY if self.process.startswith("loader") else TEXT


@dataclass
class Outcome:
    """The outcome of a case: a line of the report."""

    process: str
    stage: str
    signal: str
    launcher: str
    seconds: float | None = None  # time from the signal to the restart, or to the end
    ended: str = "hangs"  # "hangs", "restart", "exit N", or "gone" if all processes have ended
    line: str = ""  # the expected error line if there is one, otherwise the last error line
    errors: list[str] = field(default_factory=list)  # all error lines of the first attempt
    exit_code: int | None = None  # the launcher's final exit code
    bits: bool | None = None  # True if the tensor files equal those of the undisturbed run
    left: list[str] = field(default_factory=list)  # processes that outlived the launcher


class HeldJob(PausedJob):
    """A run whose processes are held at the stage that a case names."""

    def __init__(self, case: Case, cwd: Path) -> None:
        self.start = UnforkedJob if case.launcher == "new processes" else Job
        self.settings = case.settings
        self.case = case
        self.cwd = cwd
        text = patches(PATCHES, stage=case.stage)
        super().__init__(COMMANDS[case.launcher], cwd, text, *LIMITS)

    def wait_until_held(self) -> None:
        """Wait until both ranks have reached the stage, or the process that starts before them."""
        ranks = (0,) if self.case.stage in STAGES_BEFORE_RANKS else (0, 1)
        self.wait_until(self.case.stage, *ranks)
        assert "restart 1 of " not in self.job.text(), self.job.text()

    def processes(self) -> list[int]:
        """Return the ids of the processes that get the signal. `ranks` stands for all ranks."""
        if self.case.process == "ranks":
            return [self.process_at(self.case.stage, rank) for rank in (0, 1)]
        return [self._process()]

    def _process(self) -> int:
        name = self.case.process
        stage = self.case.stage
        if name == "launcher":
            return self.job.process.pid
        if name in ("store", "fork server") and stage != "imports":
            self.wait_until("store")  # the store may not have written its process id yet
        if name == "store":
            return self.process_at("store")
        if name == "fork server":
            if stage == "imports":
                return self.process_at("imports")
            return parent(self.process_at("store"))
        rank = self.process_at(stage, int(name[-1]))
        if not name.startswith("loader"):
            return rank
        wait_for(lambda: children(rank), what="a loader process")
        return children(rank)[0]

    def inject(self, number: signal.Signals) -> float:
        """Send SIGKILL or SIGSTOP to the case's processes, and wait for its effect.

        Returns:
            The time at which the signal was sent, by time.monotonic().
        """
        pids = self.processes()
        ended = [pid for pid in pids if not is_running(pid)]
        assert not ended, f"processes {ended} have ended before the signal:\n{self.job.text()}"
        sent_at = time.monotonic()
        for pid in pids:
            os.kill(pid, number)
        for pid in pids:
            if number == signal.SIGSTOP:
                assert in_time(lambda: state(pid) == "T", PATIENCE_S), describe(pid)  # noqa: B023
            elif pid == self.job.process.pid:
                self.job.process.wait()
            else:
                assert in_time(lambda: not is_running(pid), PATIENCE_S), describe(pid)  # noqa: B023
        return sent_at

    def is_over(self) -> bool:
        """Return True if the launcher and all other processes of the run have ended."""
        return self.job.process.poll() is not None and not processes_in(self.cwd)

    def has_restarted(self, before: set[int]) -> bool:
        """Return True if the launcher has restarted its workers.

        Args:
            before: Process ids of the workers before the signal.
        """
        if self.case.launcher != "torchrun":
            return "\nrestart 1 of " in self.job.text()
        now = set(self.job.workers())
        return len(now) == len(before) and not now & before

    def explain(self, outcome: Outcome) -> None:
        """Add the error lines of the first attempt to the outcome, and the line that names it."""
        first_attempt = self.job.text().partition("\nrestart 1 of ")[0]
        outcome.errors = [line for line in first_attempt.splitlines() if "error: " in line]
        named = [line for line in outcome.errors if re.search(self.case.expectation, line)]
        outcome.line = (named or outcome.errors or [""])[-1]

    def kill_all(self) -> None:
        """SIGKILL the remaining processes of the run."""
        for pid in processes_in(self.cwd):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.job.process.wait()


def parent(pid: int) -> int:
    return int(status(pid)["PPid"])


def state(pid: int) -> str:
    """Return the letter of a process's state: T if it is stopped, or "" if it has ended."""
    return status(pid).get("State", "")[:1]


def status(pid: int) -> dict[str, str]:
    lines = read(pid, "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def describe(pid: int) -> str:
    return f"{pid} {state(pid)} {read(pid, 'comm').strip()}"


def in_time(condition: Any, timeout: float) -> bool:
    """Wait for a condition. Return False if it does not hold within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def last_bits(cwd: Path) -> tuple[str, dict[str, bytes]]:
    """Return the last snapshot's name, and its tensor files of the model and the optimizer."""
    run = cwd / "outputs" / "run"
    last = max(run.glob("snapshots/step_*"), default=Path("none"))
    return last.name, tensors(run) if last.exists() else {}


def run_undisturbed(case: Case, cwd: Path) -> int:
    """Run a case without its fault. Return the exit code."""
    # The bits do not depend on the launcher, and this launcher is the fastest.
    job = Job([*COMMANDS["forkserver"], *case.settings, "ddp.timeout_s=60"], cwd)
    code = job.wait()
    in_time(lambda: not processes_in(cwd), PATIENCE_S)
    return code


def add_to_report(outcome: Outcome) -> None:
    if path := os.environ.get(REPORT):
        with open(path, "a") as file:
            print(json.dumps(asdict(outcome)), file=file)
