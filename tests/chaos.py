"""Train on an object store under random faults until a number of them is reached, and check the
guarantees.

Faults of processes, disk and clock come one at a time, those of the store and the network at the
same time from a thread. Kinds come from shuffled decks, so that each occurs. Every start has
another number of ranks and one of two launchers; with ddp.reduction=canonical the run is to have
the bits of an undisturbed one on one rank. The count is kept in a file, so that a run can be
interrupted, even by SIGKILL, and goes on from there.
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
    "optimizer.schedule=constant",  # independent of the number of steps, which is not known yet
    "ddp.reduction=canonical",
    "ddp.timeout_s=10",  # a stopped worker is noticed after 8 s
    "trainer.micro_batch_size=2",
    "trainer.eval_every=500",
    "trainer.sample_every=null",
]
MANY = 100_000_000  # steps: more than a run takes
RANKS = (1, 2, 3)
PATIENCE_S = 120.0  # seconds for an attempt to make progress, or for processes to exit
# seconds in which a fault explains that a launch exited: ddp.timeout_s, and the 30 s after which
# torchrun kills a stopped worker
RECENT_S = 60.0
FULL, READ_ONLY = "No space left on device", "Read-only file system"
DAY = 86_400


@dataclass
class Report:
    """The faults of a run so far; its fields are JSON."""

    seconds: float = 0.0  # of faults, over all sessions
    sessions: int = 0  # starts of the script
    launches: int = 0  # starts of the run
    steps: int = 0  # of the whole run, once it is complete
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    ranks: dict[str, int] = field(default_factory=dict)  # launches by launcher and ranks
    gave_up: int = 0  # launches that ended because the store was unavailable for too long

    @property
    def total(self) -> int:
        return sum(self.faults.values())


class Chaos:
    """One run under injected faults, in a directory that is to be used again to go on."""

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
        self.on_fault: Callable[[], None] = lambda: None  # is called after each
        self.job: Job | None = None
        self._counting = threading.Lock()
        self._fault_at = 0.0  # time.monotonic() of the last fault that ends an attempt

    # The count

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
        """Start the run with a launcher, ranks and restarts that are drawn anew."""
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
        settings = [*SETTINGS, f"snapshot.path=s3://{self.bucket}", f"trainer.max_steps={MANY}"]
        self.job = Job([*command, *settings, *more], self.cwd, **self.environment)

    def workers(self) -> list[int]:
        """Return the processes that train; a single one is its own parent."""
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
            InvariantError: none does.
        """
        text = job.text()
        if re.search(rf"^(?:\S+ error: )?{UNAVAILABLE}.*", text, flags=re.MULTILINE):
            self.report.gave_up += 1
            self._ends("the store was away for too long")
            return
        is_explained = time.monotonic() < self._fault_at + RECENT_S
        if not is_explained or re.search(r"error: rank \d+: |ImportError", text):
            raise InvariantError(
                f"after '{self.checker.cause}': exit code {job.process.returncode}\n{text[-5000:]}"
            )

    def _ends(self, kind: str) -> None:
        """Note that an attempt ends now, and why."""
        self.checker.read(self.run / "main.rank0.log")
        self.checker.cause, self._fault_at = kind, time.monotonic()

    def _wait_for_exit(self) -> None:
        """Wait until all processes of the run have ended, orphans too."""
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
        """Kill all processes of the run, those of an earlier session too."""
        while running := processes_in(self.cwd):
            send(running, signal.SIGKILL)
            if self.job is not None:
                self.job.process.poll()

    # Faults

    def kinds(self, has_disk: bool) -> dict[str, int]:
        """Return how often each kind occurs in a round of the deck."""
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
        """Inject one fault; return when what it ends has ended."""
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
        """Kill or stop some processes, and wait until all have ended or have been restarted."""
        assert self.job is not None
        parent, pids = self.job.process.pid, self._all_pids()
        attempts = self.checker.attempts
        self._ends(kind)
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
            self._ends(kind)
            send([self.job.process.pid if kind == "SIGTERM" else worker], signal.Signals[kind])
            self._wait_for_exit()

    def _fill_disk(self) -> None:
        """Fill the disk while the run trains; then kill it, because its history has a gap."""
        self.checker.read(self.run / "main.rank0.log")
        self.checker.disk_is_full()
        self.disk.fill()
        time.sleep(self.generator.uniform(0.2, 2))
        self._ends("disk full")
        self.kill()
        self.checker.read(self.run / "main.rank0.log")
        self.checker.disk_is_full()  # also of an attempt that has begun since then
        self.disk.free()

    def _start_on(self, kind: str) -> None:
        """Start the run on a disk that nobody can write to: it must be refused."""
        self._ends(kind)
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

    def go(self, faults: int) -> Report:
        """Inject faults until this number is reached, over all sessions; let the run complete.

        Raises:
            InvariantError: a guarantee was violated.
        """
        self.kill()
        has_disk = self.disk.mount()
        self.checker.cause = "the session was interrupted" if self.checker.logged else ""
        begin = time.monotonic() - self.report.seconds
        kinds = deck(self.generator, self.kinds(has_disk))
        try:
            self._ends(self.checker.cause)
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
        """Wait until the run has trained some more steps."""
        self.checker.read(self.run / "main.rank0.log")  # all of the attempt before
        wanted = self.checker.logged + self.generator.randint(1, 40)
        self.until(lambda: self.checker.logged >= wanted, "more steps")

    def finish(self) -> None:
        """Preempt the run, and let it complete after a few more steps, with the right time."""
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
