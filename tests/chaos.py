"""Train on an object store while random faults occur, and check the guarantees.

Training goes on until a given number of faults has been injected. The main thread injects faults
of processes, the disk and the clock, one at a time. Meanwhile another thread injects faults of the
store and the network. The kinds of faults are drawn from shuffled decks, so that each one occurs.

Every start draws a number of ranks and one of two launchers. Because of ddp.reduction=canonical,
the run must still end with the same bits as an undisturbed run on one rank. The faults are counted
in a file, so that this script can be interrupted, even by SIGKILL, and continue from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chaos_log import InvariantError, LogChecker
from chaos_machine import Clock, Disk
from chaos_store import StoreFaults, deck
from launching import TINY, Job, python_main, torchrun
from random_faults import processes_in
from s3_server import SeaweedServer
from store_limits import LEASE, UNAVAILABLE, with_limits

SETTINGS = [
    *TINY,
    "run.name=run",
    "model.dropout=0.1",
    # The number of steps is not known yet, so the schedule must not depend on it.
    "optimizer.schedule=constant",
    "ddp.reduction=canonical",
    "ddp.timeout_s=10",  # a stopped worker is noticed after 8 s
    "trainer.micro_batch_size=2",
    "trainer.eval_every=500",
    "trainer.sample_every=null",
]
# More steps than any run takes.
ENDLESS_STEPS = 100_000_000
RANKS = (1, 2, 3)
PATIENCE_S = 120.0  # seconds for an attempt to make progress, or for processes to exit
# A fault explains an exit for this many seconds. It covers ddp.timeout_s and the 30 s after which
# torchrun kills a stopped worker.
RECENT_S = 60.0
FULL, READ_ONLY = "No space left on device", "Read-only file system"
DAY = 86_400


@dataclass
class Report:
    """The faults of a run so far. All fields can be written as JSON."""

    seconds: float = 0.0  # time spent on injecting faults, over all sessions
    sessions: int = 0  # starts of the script
    launches: int = 0  # starts of the run
    steps: int = 0  # length of the whole run; 0 until it is complete
    faults: dict[str, int] = field(default_factory=dict)  # number of faults by kind
    ranks: dict[str, int] = field(default_factory=dict)  # launches by launcher and rank count
    gave_up: int = 0  # launches that ended because the store was unavailable for too long

    @property
    def total(self) -> int:
        return sum(self.faults.values())


class Chaos:
    """One run under injected faults. To continue it later, use the same directory again."""

    def __init__(self, cwd: Path, server: SeaweedServer, bucket: str, seed: int) -> None:
        self.cwd, self.bucket = cwd, bucket
        self.report, self.checker = Report(), LogChecker()
        self.state = cwd / "state.json"
        self._load()
        self.report.sessions += 1
        self.generator = random.Random(f"{seed} {self.report.sessions} {self.report.total}")
        self.store = StoreFaults(server, f"{seed} {self.report.sessions}", self.count)
        self.clock, self.disk = (
            Clock(cwd / "clock.txt"),
            Disk(cwd / "disk.img", cwd / "outputs"),
        )
        self.url = f"s3://{bucket}/run"
        self.run = cwd / "outputs" / "run"
        site = with_limits(cwd / "site", lease=LEASE, more=self.clock.source())
        self.environment = {
            **server.environment(self.store.proxy.port),
            "PYTHONPATH": site,
            "TMPDIR": str(cwd / "t"),
        }
        self.on_fault: Callable[[], None] = lambda: None  # called after each fault
        self.job: Job | None = None
        self._counting = threading.Lock()
        self._fault_at = 0.0  # time.monotonic() of the last fault that ends an attempt

    # Counting

    def _load(self) -> None:
        if self.state.exists():
            state = json.loads(self.state.read_text())
            self.report, self.checker = Report(**state["report"]), LogChecker(**state["log"])

    def _save(self) -> None:
        with self._counting:
            text = json.dumps({"report": asdict(self.report), "log": asdict(self.checker)})
        new = self.state.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.state)

    def count(self, kind: str) -> None:
        with self._counting:
            self.report.faults[kind] = self.report.faults.get(kind, 0) + 1

    # Starts and ends

    def start(self, *more: str) -> None:
        """Start the run with a newly drawn launcher, number of ranks and number of restarts."""
        shutil.rmtree(self.cwd / "t", ignore_errors=True)
        (self.cwd / "t").mkdir()
        if self.job is not None:
            self.job.output.unlink()
        ranks, restarts = self.generator.choice(RANKS), self.generator.choice([0, 3])
        launcher = self.generator.choice(["torchrun", "python"])
        command = torchrun(ranks, f"--max_restarts={restarts}")
        if launcher == "python":
            own = [f"ddp.nproc_per_node={ranks}", f"ddp.max_restarts={restarts}"]
            command = [*python_main(), *own]
        key = f"{launcher}, {ranks}"
        self.report.ranks[key] = self.report.ranks.get(key, 0) + 1
        self.report.launches += 1
        settings = [
            *SETTINGS,
            f"snapshot.path=s3://{self.bucket}",
            f"trainer.max_steps={ENDLESS_STEPS}",
        ]
        self.job = Job([*command, *settings, *more], self.cwd, **self.environment)

    def workers(self) -> list[int]:
        """Return the processes that train. A single one is also the launched process."""
        assert self.job is not None
        return self.job.workers() or [self.job.process.pid]

    def _all_pids(self) -> list[int]:
        assert self.job is not None
        return list({*self.workers(), self.job.process.pid})

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; start the run again whenever it exits."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.job is not None
            if self.job.process.poll() is not None:
                self.check_exit(self.job)
                self.start()
            if time.monotonic() > deadline:
                raise InvariantError(
                    f"timed out after {PATIENCE_S} s waiting for {what}\n{self.job.text()[-3000:]}"
                )
            self.checker.read(self.run / "main.rank0.log")
            time.sleep(0.03)

    def check_exit(self, job: Job) -> None:
        """Check that a fault explains why a launch exited.

        Raises:
            InvariantError: No recent fault explains the exit.
        """
        text = job.text()
        if re.search(rf"^(?:\S+ error: )?{UNAVAILABLE}.*", text, flags=re.MULTILINE):
            self.report.gave_up += 1
            self._note_end("the store was away for too long")
            return
        is_explained = time.monotonic() < self._fault_at + RECENT_S
        if not is_explained or re.search(r"error: rank \d+: |ImportError", text):
            raise InvariantError(
                f"after '{self.checker.cause}': exit code {job.process.returncode}\n{text[-5000:]}"
            )

    def _note_end(self, kind: str) -> None:
        """Record that an attempt ends now, and the fault that ends it."""
        self.checker.read(self.run / "main.rank0.log")
        self.checker.cause, self._fault_at = kind, time.monotonic()

    def _wait_for_exit(self) -> None:
        """Wait until all processes of the run have ended, including orphans."""
        assert self.job is not None
        deadline = time.monotonic() + PATIENCE_S
        while running := processes_in(self.cwd):
            self.job.process.poll()
            if time.monotonic() > deadline:
                raise InvariantError(
                    f"after '{self.checker.cause}': {running} still run after {PATIENCE_S} s\n"
                    f"{self.job.text()[-3000:]}"
                )
            time.sleep(0.02)
        self.job.process.wait()

    def kill(self) -> None:
        """Kill all processes of the run, including any that an earlier session left."""
        while running := processes_in(self.cwd):
            send(running, signal.SIGKILL)
            if self.job is not None:
                self.job.process.poll()

    # Faults

    def kinds(self, has_disk: bool) -> dict[str, int]:
        """Return how often each kind of fault occurs in a round of the deck."""
        machine = {"disk full": 2, "start on a full disk": 1, "start on a read-only disk": 1}
        return {
            "worker killed": 4,
            "parent killed": 3,
            "all killed": 3,
            "SIGTERM": 3,
            "SIGUSR1": 2,
            "worker stopped for a while": 2,
            "worker stopped for good": 1,
            "all stopped for a while": 2,
            "all stopped, then killed": 1,
            "clock set forward": 2,
            "clock set back": 2,
            **(machine if has_disk else {}),
        }

    def inject(self, kind: str) -> None:
        """Inject one fault. If it ends processes, wait until they have ended."""
        assert self.job is not None
        pids, workers = self._all_pids(), self.workers()
        worker = self.generator.choice(workers)
        if kind == "worker stopped for good" and len(workers) == 1:  # no other rank can detect it
            kind = "worker stopped for a while"
        self.count(kind)
        if kind.startswith("clock"):
            offset = self.generator.choice([2, 60, 3600, 30 * DAY])
            self.clock.set(offset if "forward" in kind else -offset)
        elif kind == "disk full":
            self._fill_disk()
        elif kind.startswith("start on"):
            self._start_on(kind)
        elif kind.endswith("stopped for a while"):
            chosen = pids if kind.startswith("all") else [worker]
            self._stop(chosen)
            send(chosen, signal.SIGCONT)
        elif kind in ("SIGTERM", "SIGUSR1"):
            self._preempt(kind, worker)
        else:
            self._end(kind, worker)

    def _stop(self, pids: list[int]) -> None:
        send(pids, signal.SIGSTOP)
        time.sleep(self.generator.uniform(0.1, 1.5))

    def _end(self, kind: str, worker: int) -> None:
        """Kill or stop some processes, and wait until the run has ended or has been restarted."""
        assert self.job is not None
        parent, pids = self.job.process.pid, self._all_pids()
        attempts = self.checker.attempts
        self._note_end(kind)
        if kind == "all stopped, then killed":
            self._stop(pids)
        victims = {"worker killed": [worker], "parent killed": [parent]}
        is_stop = kind == "worker stopped for good"
        chosen = [worker] if is_stop else victims.get(kind, pids)
        send(chosen, signal.SIGSTOP if is_stop else signal.SIGKILL)
        if chosen == [worker] != [parent]:
            self.until(lambda: self.checker.attempts > attempts, "a restart")
            return
        self._wait_for_exit()

    def _preempt(self, kind: str, worker: int) -> None:
        assert self.job is not None
        with self.store.lock:  # a graceful exit needs the store
            self._note_end(kind)
            send([self.job.process.pid if kind == "SIGTERM" else worker], signal.Signals[kind])
            self._wait_for_exit()

    def _fill_disk(self) -> None:
        """Fill the disk while the run trains. Then kill the run, because its history has a gap."""
        self.checker.read(self.run / "main.rank0.log")
        self.checker.disk_is_full()
        self.disk.fill()
        time.sleep(self.generator.uniform(0.2, 2))
        self._note_end("disk full")
        self.kill()
        self.checker.read(self.run / "main.rank0.log")
        # A new attempt, which found the disk full as well, may have begun since the first call.
        self.checker.disk_is_full()
        self.disk.free()

    def _start_on(self, kind: str) -> None:
        """Start the run on a disk that nobody can write to, and check that it refuses to start."""
        self._note_end(kind)
        self.kill()
        is_full = kind == "start on a full disk"
        if is_full:
            self.disk.fill()
        else:
            self.disk.set_writable(False)
        self.start()
        assert self.job is not None
        code, text = self.job.wait(PATIENCE_S), self.job.text()
        self._wait_for_exit()
        if is_full:
            self.disk.free()
        else:
            self.disk.set_writable(True)
        expected = FULL if is_full else READ_ONLY
        if code == 0 or not re.search(f"{expected}|{UNAVAILABLE}", text):
            raise InvariantError(f"a {kind}: exit code {code}\n{text[-3000:]}")

    # The whole run

    def inject_up_to(self, faults: int) -> Report:
        """Inject faults up to this total over all sessions, then let the run complete.

        Raises:
            InvariantError: A guarantee was violated.
        """
        self.kill()
        has_disk = self.disk.mount()
        self.checker.cause = "the session was interrupted" if self.checker.logged else ""
        begin = time.monotonic() - self.report.seconds
        kinds = deck(self.generator, self.kinds(has_disk))
        try:
            self._note_end(self.checker.cause)
            self.start()
            self.wait_for_steps()
            self.store.start()
            while self.report.total < faults:
                self.inject(next(kinds))
                if self.generator.random() < 0.8:
                    self.wait_for_steps()
                else:  # the next fault comes while the run starts, or right after this one
                    pause = time.monotonic() + self.generator.uniform(0, 2)
                    self.until(lambda: time.monotonic() > pause, "a pause")  # noqa: B023
                self.report.seconds = round(time.monotonic() - begin, 1)
                self._save()
                self.on_fault()
            self.store.stop()
            self.finish()
        finally:
            self.store.close()
            self.kill()
            self._save()
        return self.report

    def wait_for_steps(self) -> None:
        """Wait until the run has trained a few more steps."""
        # Read all that the previous attempt logged.
        self.checker.read(self.run / "main.rank0.log")
        wanted = self.checker.logged + self.generator.randint(1, 40)
        self.until(lambda: self.checker.logged >= wanted, "more steps")

    def finish(self) -> None:
        """Preempt the run, set the clock right, and let the run complete after a few more steps."""
        assert self.job is not None
        self.wait_for_steps()
        self._preempt("SIGTERM", 0)
        self.clock.set(0)
        self.checker.read(self.run / "main.rank0.log")
        self.report.steps = self.checker.last_step + 20
        self.start(f"trainer.max_steps={self.report.steps}")
        if self.job.wait(PATIENCE_S) != 0:
            raise InvariantError(f"the last attempt failed\n{self.job.text()[-3000:]}")
        self.checker.read(self.run / "main.rank0.log")
        if self.checker.last_step != self.report.steps:
            raise InvariantError(
                f"the run ended at step {self.checker.last_step} instead of {self.report.steps}"
            )


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
