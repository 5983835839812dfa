"""A run on an object store, and everything that can go wrong with it, at random, until time is up.

Two kinds of faults happen beside each other: what happens to processes, one at a time, and the weather on the way to
the store. Kinds come from shuffled decks, so that each has its turn. Afterwards rank 0's log is the witness: what was
trained, what was committed, where each attempt went on.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from fault_proxy import Fault, FaultProxy, Rule
from launching import ROOT, TINY, Job, is_running, torchrun
from s3_server import SeaweedServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SETTINGS = [
    *TINY,
    "trainer.max_steps=100000000",
    "trainer.eval_every=400",
    "model.dropout=0.1",
    "trainer.micro_batch_size=4",  # dropout depends on it
    "optimizer.schedule=constant",  # it does not follow from the number of steps, which follows from the time
    "snapshot.every_steps=25",
    "ddp.timeout_s=15",  # a stopped worker is noticed after 12 s
]
# Limits of mingpt_ddp.storage.remote and mingpt_ddp.storage.lease that a test has the patience for.
REMOTE = {
    "REQUEST_TIMEOUT_S": 2.0,
    "OPERATION_DEADLINE_S": 6.0,
    "MIN_BANDWIDTH": 32 << 20,
    "INITIAL_BACKOFF_S": 0.05,
    "MAX_BACKOFF_S": 0.5,
}
LEASE = {"HEARTBEAT_INTERVAL_S": 1.0, "LEASE_TTL_S": 3.0, "TAKEOVER_GRACE_S": 0.3}
PATIENCE_S = 120.0  # for an attempt to get going
# The kernel ends the server with the thread that started it: this one stays.
starter = ThreadPoolExecutor(1, "starter")
AWAY = r"(cannot (write the snapshot of step|list snapshots at|read the snapshot of step|use s3://))"


def impatient(directory: Path, remote: dict[str, float] | None = None, lease: dict[str, float] | None = None) -> str:
    """A PYTHONPATH under which every process has other limits."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = ["from mingpt_ddp.storage import lease, remote"]
    for module, values in (("remote", REMOTE if remote is None else remote), ("lease", lease or {})):
        lines += [f"{module}.{name} = {value}" for name, value in values.items()]
    (directory / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return f"{directory}{os.pathsep}{ROOT}"


@dataclass(frozen=True)
class Line:
    """What a line of the log tells."""

    time: float  # seconds since 1970
    kind: str
    step: int


class Log:
    """Rank 0's log over all attempts, read as it grows."""

    KINDS: ClassVar = {
        "begin": r"run (?!error).*",
        "resumed": r"resuming from the snapshot of step (\d+) of",
        "complete": r"complete: the snapshot of step (\d+)",
        "step": r"step (\d+)/\d+: ",
        "committed": r"snapshot of step (\d+) committed to ",
        "preempted": r"preempted at step (\d+); ",
        "too late": r"preempted at step (\d+) without time",
        "failed save": r"cannot write the snapshot of step (\d+): .*; training continues",
    }

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0
        self.lines: list[Line] = []

    def update(self) -> list[Line]:
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._offset)
            whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self._offset += len(whole)
            for text in whole.decode().splitlines():
                self._parse(text)
        return self.lines

    def _parse(self, text: str) -> None:
        head = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) [A-Z]+ ", text)
        if head is None:
            return
        for kind, pattern in self.KINDS.items():
            match = re.match(pattern, text[head.end() :])
            if match:
                when = datetime.strptime(head[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                self.lines.append(Line(when, kind, int(match[1]) if match.groups() else 0))

    def since_begin(self) -> int:
        """Steps logged by the attempt that is under way."""
        count = 0
        for line in reversed(self.update()):
            if line.kind == "begin":
                break
            count += line.kind == "step"
        return count

    def begins(self) -> int:
        return sum(line.kind == "begin" for line in self.update())


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Report:
    """What a run went through."""

    seconds: float = 0.0
    steps: int = 0
    attempts: int = 0  # that got so far as to train
    committed: int = 0
    failed_saves: int = 0  # that training went on after
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    lost: dict[str, list[int]] = field(default_factory=dict)  # steps trained again, by what ended the attempt
    gave_up: list[str] = field(default_factory=list)  # one line each: the store was away for too long
    unexpected: list[str] = field(default_factory=list)


class Chaos:
    """One run, disturbed."""

    def __init__(self, cwd: Path, server: SeaweedServer, bucket: str, seed: int, ranks: tuple[int, ...] = (2,)) -> None:
        """
        Args:
            ranks: the world sizes to choose from at every start; of one alone, the agent restarts workers itself.
        """
        self.cwd, self.server, self.ranks = cwd, server, ranks
        self.choice, self.skies = random.Random(f"processes {seed}"), random.Random(f"weather {seed}")
        self.proxy = FaultProxy(server.port, seed)
        self.name = f"chaos-{seed}-{'-'.join(map(str, ranks))}"
        self.url = f"s3://{bucket}/{self.name}/run"
        self.run = cwd / "outputs" / "run"
        self.log = Log(self.run / "main.rank0.log")
        self.environment = {**server.environment(self.proxy.port), "PYTHONPATH": impatient(cwd / "site", lease=LEASE)}
        self.settings = [*SETTINGS, "run.name=run", f"snapshot.path={self.url.rpartition('/')[0]}"]
        self.report = Report()
        self.ended: list[tuple[float, str]] = []  # when an attempt was made to end, and by what
        self.server_lock = threading.Lock()
        self.over = threading.Event()
        self.job: Job | None = None

    def count(self, kind: str) -> None:
        self.report.faults[kind] = self.report.faults.get(kind, 0) + 1

    # The processes.

    def start(self, *more: str) -> None:
        restarts = ["--max_restarts=5"] if len(self.ranks) == 1 else []
        command = torchrun(self.choice.choice(self.ranks), *restarts)
        self.job = Job([*command, *self.settings, *more], self.cwd, **self.environment)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; whenever the launch ends by itself, start it again."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.job is not None
            if self.job.process.poll() is not None:
                self.take_note(self.job)
                self.start()
            if time.monotonic() > deadline:
                text = self.job.text()[-3000:]
                self.job.kill_tree()
                raise Broken(f"{what}: nothing for {PATIENCE_S} s\n{text}")
            time.sleep(0.03)

    def take_note(self, job: Job) -> None:
        """Why did it end?"""
        text = job.text()
        away = re.search(rf"^(?:\S+ error: )?{AWAY}.*", text, flags=re.MULTILINE)
        known = [when for when, _ in self.ended if when > time.time() - 30]
        if away:
            self.report.gave_up.append(away[0])
            self.ended.append((time.time(), "the store was away for too long"))
        elif not known or re.search(r"error: rank \d+: |ImportError", text):
            self.report.unexpected.append(f"exit code {job.process.returncode}\n{text[-3000:]}")
        time.sleep(0.5)

    def get_going(self, begins: int) -> None:
        """Another attempt has begun and trained some steps."""
        some = self.choice.randint(5, 150)
        self.until(lambda: self.log.begins() > begins and self.log.since_begin() >= some, f"attempt {begins + 1}")

    def disturb(self, kind: str) -> None:
        """One fault of a process; returns when training goes on."""
        assert self.job is not None
        begins = self.log.begins()
        workers = self.job.workers()
        if not workers:
            return
        victim = self.choice.choice(workers)
        if kind == "worker stopped for good" and len(workers) == 1:  # nobody is there to notice
            kind = "worker stopped for a second"
        self.count(kind)
        if kind == "worker stopped for a second":
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGSTOP)
                time.sleep(1)
                os.kill(victim, signal.SIGCONT)
            return
        polite = kind in ("SIGTERM", "SIGUSR1")
        with self.server_lock if polite else contextlib.nullcontext():  # who is asked politely finds the store alive
            self.ended.append((time.time(), kind))
            with contextlib.suppress(ProcessLookupError):
                self._signal(kind, victim, workers)
            if polite:
                self._await_end(workers)
        if kind == "agent killed":
            self._await_end(workers)
        if kind in ("worker killed", "worker stopped for good") and len(self.ranks) == 1:
            self.until(lambda: self.log.begins() > begins, "a restart by the agent")
        else:
            self._await_end([*workers, self.job.process.pid])
            self.job.process.wait()
            self.start()
        self.get_going(begins)

    def _signal(self, kind: str, victim: int, workers: list[int]) -> None:
        assert self.job is not None
        if kind == "worker killed":
            os.kill(victim, signal.SIGKILL)
        elif kind == "worker stopped for good":
            os.kill(victim, signal.SIGSTOP)
        elif kind == "agent killed":
            self.job.process.kill()
        elif kind == "all killed":
            self.job.kill_tree()
        elif kind == "SIGTERM":
            self.job.process.send_signal(signal.SIGTERM)
        else:
            os.kill(victim, signal.SIGUSR1)

    def _await_end(self, pids: list[int]) -> None:
        assert self.job is not None
        deadline = time.monotonic() + PATIENCE_S
        while any(map(is_running, pids)):
            self.job.process.poll()
            if time.monotonic() > deadline:
                raise Broken(f"still there after {PATIENCE_S} s\n{self.job.text()[-3000:]}")
            time.sleep(0.02)

    # The weather.

    def _weather(self) -> None:
        skies = self.skies
        kinds = deck(skies, {"store killed": 2, "errors 503": 2, "resets": 2, "stalls": 2, "answers lost": 1})
        while not self.over.wait(skies.uniform(0.5, 5)):
            kind = next(kinds)
            self.count(kind)
            if kind == "store killed":
                with self.server_lock:
                    self.server.kill()
                    self.over.wait(skies.uniform(0, 6))
                    starter.submit(self.server.start).result()
                continue
            some = {"times": float("inf"), "probability": skies.uniform(0.2, 0.7)}
            self.proxy.rules = {
                "errors 503": [Rule(".", Fault.STATUS, **some)],
                "resets": [
                    Rule("^PUT", Fault.RESET_SENDING, after=skies.randint(0, 20_000), **some),
                    Rule("^GET", Fault.RESET_ANSWERING, after=skies.randint(0, 20_000), **some),
                    Rule(".", Fault.RESET_BEFORE, times=3),
                ],
                "stalls": [Rule("^PUT", Fault.STALL_SENDING, after=100, times=2), Rule(".", Fault.STALL, times=2)],
                "answers lost": [Rule("^(PUT|DELETE|POST)", Fault.RESET_UNANSWERED, **some)],
            }[kind]
            self.over.wait(skies.uniform(1, 4))
            self.proxy.heal()

    # All of it.

    def go(self, seconds: float) -> Report:
        """Disturb the run for so long, then let it finish, then see what has become of it.

        Raises:
            Broken: a promise was not kept.
        """
        begin = time.monotonic()
        weather = threading.Thread(target=self._weather, daemon=True)
        calm_end = False
        try:
            self.start()
            self.get_going(0)
            weather.start()
            kinds = deck(
                self.choice,
                {
                    "worker killed": 3,
                    "agent killed": 2,
                    "all killed": 2,
                    "SIGTERM": 2,
                    "SIGUSR1": 1,
                    "worker stopped for a second": 1,
                    "worker stopped for good": 1,
                },
            )
            while time.monotonic() < begin + seconds:
                self.disturb(next(kinds))
                pause = time.monotonic() + self.choice.uniform(0, 1.5)
                self.until(lambda: time.monotonic() > pause, "a pause")  # noqa: B023
            calm_end = True
        finally:
            self.over.set()
            if weather.ident is not None:
                weather.join()
            self.proxy.heal()
            if not calm_end and self.job is not None and self.job.process.poll() is None:
                self.job.kill_tree()
        self.finish()
        self.report.seconds = round(time.monotonic() - begin, 1)
        self.account()
        self.proxy.close()
        return self.report

    def finish(self) -> None:
        """Some steps more, and the end."""
        assert self.job is not None
        self.until(lambda: self.log.since_begin() > 0, "the last attempt")
        workers = self.job.workers()
        self.ended.append((time.time(), "SIGTERM"))
        self.count("SIGTERM")
        self.job.process.send_signal(signal.SIGTERM)
        self._await_end([*workers, self.job.process.pid])
        newest = max(line.step for line in self.log.update() if line.kind == "step")
        self.report.steps = newest + 20
        self.start(f"trainer.max_steps={self.report.steps}")
        if self.job.wait(PATIENCE_S) != 0:
            raise Broken(f"the last attempt failed\n{self.job.text()[-3000:]}")

    def account(self) -> None:
        """Hold the log against the promises.

        Raises:
            Broken: one was not kept.
        """
        report, history, committed, fresh, last = self.report, 0, 0, True, ""
        for line in self.log.update():
            if line.kind == "begin":
                report.attempts += 1
                fresh, resumed, began = True, 0, line.time
            elif line.kind == "resumed":
                resumed = line.step
            elif line.kind == "step":
                if fresh and report.attempts > 1:
                    cause = self._cause(began)
                    self._maybe_prune(cause, last, resumed, history, committed)
                    report.lost.setdefault(cause, []).append(history - resumed)
                    history, last = resumed, ""
                fresh = False
                if line.step != history + 1:
                    raise Broken(f"step {line.step} was logged after step {history}")
                history = line.step
            elif line.kind == "committed":
                committed = line.step
                report.committed += 1
            elif line.kind == "failed save":
                report.failed_saves += 1
            else:
                last = line.kind
        if history != report.steps:
            raise Broken(f"the run ended at step {history} instead of {report.steps}")
        if report.unexpected:
            raise Broken("\n\n".join(report.unexpected))

    def _cause(self, began: float) -> str:
        causes = [kind for when, kind in self.ended if when < began]
        return causes[-1] if causes else "unknown"

    def _maybe_prune(self, cause: str, last: str, resumed: int, history: int, committed: int) -> None:
        if resumed < committed:
            raise Broken(f"after '{cause}': from step {resumed}, although that of step {committed} was committed")
        if resumed > history:
            raise Broken(f"after '{cause}': from step {resumed}, although only {history} were trained")
        if last == "preempted" and resumed != history:
            raise Broken(f"'{cause}' lost {history - resumed} steps, although it said that it had not")


def deck(generator: random.Random, kinds: dict[str, int]) -> Iterator[str]:
    """Kinds for ever, in random order; of any sum(kinds) in a row from the start, each comes as often as it says."""
    while True:
        cards = [kind for kind, count in kinds.items() for _ in range(count)]
        generator.shuffle(cards)
        yield from cards


def undisturbed(cwd: Path, steps: int, ranks: int) -> Path:
    """The same run on a local disk, to whose end nothing happened; its directory."""
    settings = [*SETTINGS, "run.name=run", f"trainer.max_steps={steps}", "snapshot.every_steps=null"]
    job = Job([*torchrun(ranks), *settings], cwd)
    if job.wait(600) != 0:
        raise Broken(job.text()[-3000:])
    return cwd / "outputs" / "run"


def logged_steps(run: Path, rank: int) -> list[int]:
    """The steps of a rank's loss curve, as TensorBoard reads them."""
    events = EventAccumulator(str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("train/loss")]
