"""Train on an object store under random faults for a given time, and check the guarantees from the
log.

Two kinds of faults are injected concurrently: process faults, one at a time, and faults of the
network and the store. Kinds come from shuffled decks, so that each occurs. Afterwards the log of
rank zero shows which steps were trained, which snapshots were committed, and where each attempt
resumed.
"""

from __future__ import annotations

import contextlib
import json
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
    "optimizer.schedule=constant",  # independent of the number of steps, which depends on the time
    # At 1e-3 training amplifies the rounding, which differs by the number of ranks, to 3e-4 of the
    # loss on some texts.
    "optimizer.lr=2e-4",
    "snapshot.every_steps=25",
    "ddp.timeout_s=15",  # a stopped worker is noticed after 12 s
]
# Limits of mingpt_ddp.storage.remote and mingpt_ddp.storage.lease, shortened for a test.
REMOTE = {
    "REQUEST_TIMEOUT_S": 2.0,
    "OPERATION_DEADLINE_S": 6.0,
    "MIN_BANDWIDTH": 32 << 20,
    "INITIAL_BACKOFF_S": 0.05,
    "MAX_BACKOFF_S": 0.5,
}
LEASE = {"HEARTBEAT_INTERVAL_S": 1.0, "LEASE_TTL_S": 3.0, "TAKEOVER_GRACE_S": 0.3}
PATIENCE_S = 120.0  # seconds for an attempt to make progress
LEAST_FAULTS = 3
# The kernel kills the server when the thread that started it ends: this one does not end.
server_thread = ThreadPoolExecutor(1, "starter")
UNAVAILABLE = (
    r"(cannot (write the snapshot of step|list snapshots at|read the snapshot of step|use s3://))"
)


def with_limits(
    directory: Path, remote: dict[str, float] | None = None, lease: dict[str, float] | None = None
) -> str:
    """Return a PYTHONPATH whose sitecustomize module sets other limits in every process."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = ["from mingpt_ddp.storage import lease, remote"]
    for module, values in (
        ("remote", REMOTE if remote is None else remote),
        ("lease", lease or {}),
    ):
        lines += [f"{module}.{name} = {value}" for name, value in values.items()]
    (directory / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return f"{directory}{os.pathsep}{ROOT}"


@dataclass(frozen=True)
class Line:
    """A parsed line of the log."""

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
            content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            self._offset += len(content)
            for text in content.decode().splitlines():
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

    def steps_of_attempt(self) -> int:
        """Return the number of steps logged by the current attempt."""
        count = 0
        for line in reversed(self.update()):
            if line.kind == "begin":
                break
            count += line.kind == "step"
        return count

    def attempts(self) -> int:
        return sum(line.kind == "begin" for line in self.update())


class InvariantError(AssertionError):
    """A guarantee was violated."""


@dataclass
class Report:
    """The faults of a run, and what they cost."""

    seconds: float = 0.0
    steps: int = 0
    attempts: int = 0  # that started to train
    committed: int = 0
    failed_saves: int = 0  # after which training continued
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    # steps trained again, by what ended the attempt
    lost: dict[str, list[int]] = field(default_factory=dict)
    # one line each: the store was unavailable for too long
    gave_up: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Chaos:
    """One run under injected faults."""

    def __init__(
        self,
        cwd: Path,
        server: SeaweedServer,
        bucket: str,
        seed: int,
        ranks: tuple[int, ...] = (2,),
    ) -> None:
        """
        Args:
            ranks: the world sizes to choose from at every start; if there is only one, the agent
                restarts workers.
        """
        self.cwd, self.server, self.ranks = cwd, server, ranks
        self.process_rng, self.network_rng = (
            random.Random(f"processes {seed}"),
            random.Random(f"weather {seed}"),
        )
        self.proxy = FaultProxy(server.port, seed)
        self.name = f"chaos-{seed}-{'-'.join(map(str, ranks))}"
        self.url = f"s3://{bucket}/{self.name}/run"
        self.run = cwd / "outputs" / "run"
        self.log = Log(self.run / "main.rank0.log")
        self.environment = {
            **server.environment(self.proxy.port),
            "PYTHONPATH": with_limits(cwd / "site", lease=LEASE),
        }
        self.settings = [*SETTINGS, "run.name=run", f"snapshot.path={self.url.rpartition('/')[0]}"]
        self.report = Report()
        self.ended: list[tuple[float, str]] = []  # when an attempt was ended, and the fault
        self.server_lock = threading.Lock()
        self.finished = threading.Event()
        self.job: Job | None = None

    def count(self, kind: str) -> None:
        self.report.faults[kind] = self.report.faults.get(kind, 0) + 1

    # Process faults

    def start(self, *more: str) -> None:
        restarts = ["--max_restarts=5"] if len(self.ranks) == 1 else []
        command = torchrun(self.process_rng.choice(self.ranks), *restarts)
        self.job = Job([*command, *self.settings, *more], self.cwd, **self.environment)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; restart the launch whenever it exits."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.job is not None
            if self.job.process.poll() is not None:
                self.record_exit(self.job)
                self.start()
            if time.monotonic() > deadline:
                text = self.job.text()[-3000:]
                self.job.kill_tree()
                raise InvariantError(f"timed out after {PATIENCE_S} s waiting for {what}\n{text}")
            time.sleep(0.03)

    def record_exit(self, job: Job) -> None:
        """Record why the launch exited."""
        text = job.text()
        unavailable = re.search(rf"^(?:\S+ error: )?{UNAVAILABLE}.*", text, flags=re.MULTILINE)
        recent = [when for when, _ in self.ended if when > time.time() - 30]
        if unavailable:
            self.report.gave_up.append(unavailable[0])
            self.ended.append((time.time(), "the store was away for too long"))
        elif not recent or re.search(r"error: rank \d+: |ImportError", text):
            self.report.unexpected.append(f"exit code {job.process.returncode}\n{text[-3000:]}")
        time.sleep(0.5)

    def wait_for_progress(self, attempts: int) -> None:
        """Wait until another attempt has trained some steps."""
        steps = self.process_rng.randint(5, 150)
        self.until(
            lambda: self.log.attempts() > attempts and self.log.steps_of_attempt() >= steps,
            f"attempt {attempts + 1}",
        )

    def inject_process_fault(self, kind: str) -> None:
        """Inject one process fault; return when training has resumed."""
        assert self.job is not None
        attempts = self.log.attempts()
        workers = self.job.workers()
        if not workers:
            return
        pid = self.process_rng.choice(workers)
        if kind == "worker stopped for good" and len(workers) == 1:  # no other rank can detect it
            kind = "worker stopped for a second"
        self.count(kind)
        if kind == "worker stopped for a second":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(1)
                os.kill(pid, signal.SIGCONT)
            return
        graceful = kind in ("SIGTERM", "SIGUSR1")
        # a graceful exit needs the store
        with self.server_lock if graceful else contextlib.nullcontext():
            self.ended.append((time.time(), kind))
            with contextlib.suppress(ProcessLookupError):
                self._signal(kind, pid, workers)
            if graceful:
                self._wait_for_exit(workers)
        if kind == "agent killed":
            self._wait_for_exit(workers)
        if kind in ("worker killed", "worker stopped for good") and len(self.ranks) == 1:
            self.until(lambda: self.log.attempts() > attempts, "a restart by the agent")
        else:
            self._wait_for_exit([*workers, self.job.process.pid])
            self.job.process.wait()
            self.start()
        self.wait_for_progress(attempts)

    def _signal(self, kind: str, pid: int, workers: list[int]) -> None:
        assert self.job is not None
        if kind == "worker killed":
            os.kill(pid, signal.SIGKILL)
        elif kind == "worker stopped for good":
            os.kill(pid, signal.SIGSTOP)
        elif kind == "agent killed":
            self.job.process.kill()
        elif kind == "all killed":
            self.job.kill_tree()
        elif kind == "SIGTERM":
            self.job.process.send_signal(signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGUSR1)

    def _wait_for_exit(self, pids: list[int]) -> None:
        assert self.job is not None
        deadline = time.monotonic() + PATIENCE_S
        while any(map(is_running, pids)):
            self.job.process.poll()
            if time.monotonic() > deadline:
                raise InvariantError(
                    f"still running after {PATIENCE_S} s\n{self.job.text()[-3000:]}"
                )
            time.sleep(0.02)

    # Faults of the network and the store

    def _inject_network_faults(self) -> None:
        rng = self.network_rng
        kinds = deck(
            rng, {"store killed": 2, "errors 503": 2, "resets": 2, "stalls": 2, "answers lost": 1}
        )
        while not self.finished.wait(rng.uniform(0.5, 5)):
            kind = next(kinds)
            self.count(kind)
            if kind == "store killed":
                with self.server_lock:
                    self.server.kill()
                    self.finished.wait(rng.uniform(0, 6))
                    server_thread.submit(self.server.start).result()
                continue
            options = {"times": float("inf"), "probability": rng.uniform(0.2, 0.7)}
            self.proxy.rules = {
                "errors 503": [Rule(".", Fault.STATUS, **options)],
                "resets": [
                    Rule("^PUT", Fault.RESET_SENDING, after=rng.randint(0, 20_000), **options),
                    Rule("^GET", Fault.RESET_ANSWERING, after=rng.randint(0, 20_000), **options),
                    Rule(".", Fault.RESET_BEFORE, times=3),
                ],
                "stalls": [
                    Rule("^PUT", Fault.STALL_SENDING, after=100, times=2),
                    Rule(".", Fault.STALL, times=2),
                ],
                "answers lost": [Rule("^(PUT|DELETE|POST)", Fault.RESET_UNANSWERED, **options)],
            }[kind]
            self.finished.wait(rng.uniform(1, 4))
            self.proxy.heal()

    # The whole run

    def go(self, seconds: float) -> Report:
        """Inject faults for this time, at least LEAST_FAULTS that end an attempt; let the run
        finish; check its log.

        Raises:
            InvariantError: a guarantee was violated.
        """
        begin = time.monotonic()
        network_faults = threading.Thread(target=self._inject_network_faults, daemon=True)
        succeeded = False
        try:
            self.start()
            self.wait_for_progress(0)
            network_faults.start()
            kinds = deck(
                self.process_rng,
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
            while time.monotonic() < begin + seconds or len(self.ended) < LEAST_FAULTS:
                self.inject_process_fault(next(kinds))
                pause = time.monotonic() + self.process_rng.uniform(0, 1.5)
                self.until(lambda: time.monotonic() > pause, "a pause")  # noqa: B023
            succeeded = True
        finally:
            self.finished.set()
            if network_faults.ident is not None:
                network_faults.join()
            self.proxy.heal()
            if not succeeded and self.job is not None and self.job.process.poll() is None:
                self.job.kill_tree()
        self.finish()
        self.report.seconds = round(time.monotonic() - begin, 1)
        self.check_log()
        self.proxy.close()
        return self.report

    def finish(self) -> None:
        """Preempt the run, and let it complete after a few more steps."""
        assert self.job is not None
        self.until(lambda: self.log.steps_of_attempt() > 0, "the last attempt")
        workers = self.job.workers()
        self.ended.append((time.time(), "SIGTERM"))
        self.count("SIGTERM")
        self.job.process.send_signal(signal.SIGTERM)
        self._wait_for_exit([*workers, self.job.process.pid])
        newest = max(line.step for line in self.log.update() if line.kind == "step")
        self.report.steps = newest + 20
        self.start(f"trainer.max_steps={self.report.steps}")
        if self.job.wait(PATIENCE_S) != 0:
            raise InvariantError(f"the last attempt failed\n{self.job.text()[-3000:]}")

    def check_log(self) -> None:
        """Check the log against the guarantees.

        Raises:
            InvariantError: one was violated.
        """
        report, last_step, committed, first_step, last_kind = self.report, 0, 0, True, ""
        for line in self.log.update():
            if line.kind == "begin":
                report.attempts += 1
                first_step, resumed, began = True, 0, line.time
            elif line.kind == "resumed":
                resumed = line.step
            elif line.kind == "step":
                if first_step and report.attempts > 1:
                    cause = self._cause_before(began)
                    self._check_resumed_step(cause, last_kind, resumed, last_step, committed)
                    report.lost.setdefault(cause, []).append(last_step - resumed)
                    last_step, last_kind = resumed, ""
                first_step = False
                if line.step != last_step + 1:
                    raise InvariantError(f"step {line.step} was logged after step {last_step}")
                last_step = line.step
            elif line.kind == "committed":
                committed = line.step
                report.committed += 1
            elif line.kind == "failed save":
                report.failed_saves += 1
            else:
                last_kind = line.kind
        if last_step != report.steps:
            raise InvariantError(f"the run ended at step {last_step} instead of {report.steps}")
        if report.unexpected:
            raise InvariantError("\n\n".join(report.unexpected))

    def _cause_before(self, began: float) -> str:
        causes = [kind for when, kind in self.ended if when < began]
        return causes[-1] if causes else "unknown"

    def _check_resumed_step(
        self, cause: str, last_kind: str, resumed: int, last_step: int, committed: int
    ) -> None:
        if resumed < committed:
            raise InvariantError(
                f"after '{cause}': from step {resumed}, although step {committed} was committed"
            )
        if resumed > last_step:
            raise InvariantError(
                f"after '{cause}': from step {resumed}, although only {last_step} were trained"
            )
        if last_kind == "preempted" and resumed != last_step:
            raise InvariantError(
                f"'{cause}' lost {last_step - resumed} steps, although it was reported to lose none"
            )


def deck(generator: random.Random, kinds: dict[str, int]) -> Iterator[str]:
    """Yield kinds forever, in shuffled rounds: a round has every kind as often as its count."""
    while True:
        shuffled = [kind for kind, count in kinds.items() for _ in range(count)]
        generator.shuffle(shuffled)
        yield from shuffled


def undisturbed(cwd: Path, steps: int, ranks: int) -> Path:
    """Train the same run on a local disk without faults; return its directory."""
    settings = [
        *SETTINGS,
        "run.name=run",
        f"trainer.max_steps={steps}",
        "snapshot.every_steps=null",
    ]
    job = Job([*torchrun(ranks), *settings], cwd)
    if job.wait(600) != 0:
        raise InvariantError(job.text()[-3000:])
    return cwd / "outputs" / "run"


def loss_curve(run: Path, rank: int) -> list[tuple[int, float]]:
    """Return the steps and values of the loss curve of a rank, as TensorBoard reads them."""
    events = EventAccumulator(
        str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}
    ).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def logged_steps(run: Path, rank: int) -> list[int]:
    return [step for step, _ in loss_curve(run, rank)]


def where_they_differ(run: Path, reference: Path, limit: float) -> str:
    """Say since which step the loss curves of two runs differ, and which attempt of the first
    trained that step.
    """
    other = dict(loss_curve(reference, 0))
    since = next(
        (step for step, loss in loss_curve(run, 0) if abs(loss - other[step]) > limit), None
    )
    if since is None:
        return "the loss curves are equal: suspect the evaluation"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    starts = [(line["step"], line["world_size"]) for line in lines if "start" in line]
    return f"the losses differ since step {since}; the starts were at (step, ranks) {starts}"
