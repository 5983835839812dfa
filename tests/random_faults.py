"""Send signals to the processes of a run at random moments, and restart it until it is complete.

Its result must be the same as that of an undisturbed run. All random numbers come from a seed, but
the moments also depend on the load of the machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launching import Job, children, is_running, last_step, read, wait_for

from mingpt_ddp.storage.run_directory import read_result

# How often each victim, and each sequence of signals, occurs in a round.
VICTIMS = {"worker": 3, "parent": 2, "server": 1, "all": 2}
ENDS = {"KILL": 4, "TERM": 2, "INT": 1, "STOP CONT": 1, "STOP KILL": 1, "STOP TERM CONT": 1}
ORPHANS_END_S = 30.0  # orphans end within this time, even on a busy machine
TIMES = ("wall_seconds", "goodput")  # fields of result.json that differ between equal runs


@dataclass
class FaultyRun:
    """A run with faults, in a directory of its own."""

    cwd: Path
    command: list[str]
    generator: random.Random = field(default_factory=random.Random)
    start_job: Callable[..., Job] = Job
    jobs: list[Job] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cwd.mkdir()
        self.run = self.cwd / "outputs" / "run"
        self.tmpdir = Path(self.cwd, "t")
        self.tmpdir.mkdir()

    def start(self) -> Job:
        self.jobs.append(
            self.start_job([*self.command, "run.name=run"], self.cwd, TMPDIR=str(self.tmpdir))
        )
        return self.jobs[-1]

    @property
    def is_complete(self) -> bool:
        return read_result(self.run).get("status") == "complete"

    def processes(self) -> list[int]:
        """Return the processes of the run, including orphans: those that work in its directory."""
        return processes_in(self.cwd)

    def wait_for_end(self) -> None:
        """Wait until the parent and then all other processes have ended."""
        self.jobs[-1].wait()
        wait_for(
            lambda: not self.processes(),
            ORPHANS_END_S,
            f"the end of the orphans {self.processes()}",
        )

    def inject_faults(
        self, moments: Iterable[int | None], victims: Iterable[str], ends: Iterable[str]
    ) -> None:
        """Inject faults, and start the run again whenever it has ended.

        Args:
            moments: The step that the run must reach before each fault. None injects the fault
                while the run starts or restarts.
            victims: The process or processes that each fault hits: a key of VICTIMS.
            ends: The signals of each fault: a key of ENDS.
        """
        job, logged = self.start(), 0
        for step, victim, end in zip(moments, victims, ends, strict=False):
            if job.process.poll() is not None:
                self.wait_for_end()
            if self.is_complete:
                return
            if job.process.poll() is not None:
                job = self.start()
            if step is not None:
                self._wait_or_end(partial(self._has_reached, step, logged), f"step {step}")
            time.sleep(self.generator.uniform(0, 2 if step is None else 0.1))
            self._wait_or_end(partial(self._pids, victim), f"the {victim}")
            if job.process.poll() is None and not self.is_complete:
                self._inject(victim, end.split())
            logged = len(self._logged_steps())

    def _wait_or_end(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition, or for the end of the job."""
        job = self.jobs[-1]
        wait_for(lambda: condition() or job.process.poll() is not None, what=what)

    def _logged_steps(self) -> list[str]:
        log = self.run / "main.rank0.log"
        return re.findall(r" INFO step (\d+)/", log.read_text()) if log.exists() else []

    def _has_reached(self, step: int, logged: int) -> bool:
        """Return True if rank zero has logged this step, and the run has gone on since then.

        Args:
            step: The step to be reached.
            logged: Number of steps in the log at the previous fault.
        """
        steps = self._logged_steps()
        return len(steps) > logged and max(map(int, steps)) >= step

    def _pids(self, victim: str) -> list[int]:
        job = self.jobs[-1]
        workers = job.workers()
        if victim == "worker":
            return [*workers, *(loader for worker in workers for loader in children(worker))]
        if victim == "server":
            return servers(job.process.pid)
        return [job.process.pid] if victim == "parent" else self.processes()

    def _inject(self, victim: str, numbers: list[str]) -> None:
        """Send the signals of a fault to one of the victim's processes, or to all in any order."""
        pids = self._pids(victim)
        self.generator.shuffle(pids)
        pids = pids if victim == "all" else pids[:1]
        self.faults.append(f"{' '.join(numbers)} to {victim} at step {last_step(self.run)}")
        for index, number in enumerate(numbers):
            time.sleep(self.generator.uniform(0, 1) if index else 0)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[f"SIG{number}"])

    def kill(self) -> None:
        """Kill all running processes of the run."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Let the run complete without faults."""
        self.wait_for_end()
        if not self.is_complete:
            assert self.start().wait() == 0, self.jobs[-1].text()
            self.wait_for_end()


def processes_in(directory: Path) -> list[int]:
    """Return the processes whose working directory is this one."""
    pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
    return [pid for pid in pids if works_in(pid, directory)]


def works_in(pid: int, directory: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == directory and is_running(pid)
    except OSError:  # the process belongs to another user or has ended
        return False


def servers(parent: int) -> list[int]:
    """Return the process id of the workers' fork server, if it runs."""
    return [pid for pid in children(parent) if "resource_tracker" not in read(pid, "cmdline")]


def result(run: Path) -> dict:
    return {key: value for key, value in read_result(run).items() if key not in TIMES}


def tensors(run: Path) -> dict[str, bytes]:
    """Return the tensor files of the last snapshot by name."""
    last = max(run.glob("snapshots/step_*"))
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def names(run: Path) -> set[str]:
    """Return the paths of all files of a run, with one name for all event files of a rank."""
    paths = (path.relative_to(run).as_posix() for path in run.rglob("*"))
    return {re.sub(r"events\.out\.tfevents\..*", "events", path) for path in paths}
