"""Track the state and the time of a part of gpu.py, and run commands that it monitors or kills."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
import string
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from common import TEXT_VARIABLE, cell, compare, compose_config, corpus_path, last_step, log, spread
from gpu_kept import Kept
from stopwatch import find_worker, running

T = TypeVar("T")
Table = tuple[dict[str, Any], list[str], list[list[str]]]  # figures, header, rows
MARGIN = 1.2  # allow a run this many times the duration of the previous one
RESERVE_S = 5.0  # time at the end of a part that is reserved for its report
TEXT_SEED = 0  # seed of the random text that replaces tinyshakespeare for speed measurements


@dataclass
class Part:
    """A running part of the measurements.

    Attributes:
        dry: True for a smoke test with tiny sizes on the CPU.
        scratch: A temporary directory.
        text: Path of the training text.
        nanogpt: Path of a checkout of nanoGPT, or None.
        repetitions: Largest number of repetitions of a measurement.
        ends_at: Time at which the part must end, by time.monotonic().
        facts: Facts about the device.
        kept: Finished measurements of earlier calls and of this one.
        out: Directory for runs that a later call continues. None uses the temporary directory.
        repetition: Number of the current repetition.
        notes: The skipped measurements, each with a reason.
        failures: The failed measurements, each with its error.
    """

    dry: bool
    scratch: Path
    text: Path
    nanogpt: Path | None
    repetitions: int
    ends_at: float
    facts: dict[str, Any] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)
    out: Path | None = None
    repetition: int = 1
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def compiles(self) -> bool:
        return self.facts.get("cannot_compile") is None

    def left_s(self) -> float:
        return max(0.1, self.ends_at - RESERVE_S - time.monotonic())

    def skip(self, what: str, why: str) -> None:
        self.notes.append(f"{what}: {why}")
        log(f"skipped: {what}: {why}")

    @contextlib.contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Limit this context to a share of the remaining time."""
        ends_at = self.ends_at
        self.ends_at = time.monotonic() + share * self.left_s() + RESERVE_S
        try:
            yield
        finally:
            self.ends_at = ends_at

    def attempt(self, what: str, work: Callable[[], T], needed_s: float = 0.0) -> T | None:
        """Call `work` and return its result. Return None if it fails or the time is up.

        Args:
            what: Name of the measurement in the log.
            work: The measurement.
            needed_s: Seconds that it is expected to take. It is skipped if less time is left.
        """
        if self.left_s() <= needed_s + 1:
            self.skip(what, "no time left")
            return None
        try:
            return work()
        # Note the failure, and continue with the other measurements.
        except (Exception, SystemExit) as error:
            if self.left_s() < 1:
                self.skip(what, "not finished in time")
            else:
                self.failures.append(f"{what}: {str(error).strip()[-2000:]}")
                log(f"failed: {self.failures[-1]}")
            return None

    def measure(self, what: str, work: Callable[[], T], needed_s: float = 0.0) -> T | None:
        """Return the kept result of a measurement, or call `work` as `attempt` does and keep it.

        The result must be a JSON value.
        """
        if what in self.kept:
            found: T = self.kept.value(what)
            return found
        begin = time.monotonic()
        value = self.attempt(what, work, needed_s)
        if value is not None:
            self.kept.put(what, value, time.monotonic() - begin)
            log(f"{what}: {value if isinstance(value, (int, float)) else 'done'}")
        return value

    def alternate(self, what: str, candidates: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
        """Measure candidates in turns, until all repetitions are done or the time is up.

        A candidate that fails is dropped.
        """
        values: dict[str, list[T]] = {name: [] for name in candidates}
        took = dict.fromkeys(candidates, 0.0)
        for repetition in range(1, self.repetitions + 1):
            self.repetition = repetition
            for name in list(took):
                key = f"{what}, {name}, repetition {repetition}"
                value = self.measure(key, candidates[name], took[name] * MARGIN)
                if value is None:
                    del took[name]
                    continue
                took[name] = self.kept.seconds(key)
                values[name].append(value)
        return {name: measured for name, measured in values.items() if measured}


def ratios(ours: list[float] | None, theirs: list[float] | None) -> dict[str, Any] | None:
    """Divide our values by theirs, as far as there are pairs, and compute the spread."""
    pairs = list(zip(ours or [], theirs or [], strict=False))
    return compare(*zip(*pairs, strict=True)) if pairs else None


def shown(ratio: dict[str, Any] | None, form: str = ".3f") -> str:
    return cell(ratio, form) if ratio else "-"


def spreads(values: Mapping[str, list[float]]) -> dict[str, Any]:
    return {name: spread(measured) for name, measured in values.items()}


# For new processes.


def device_facts(device: str) -> dict[str, Any]:
    """Collect facts about the device. Call this in a new process, because it uses GPU memory."""
    import torch
    from matmul_rate import measured_matmul_flops

    import mingpt_ddp.cli.train_job
    import mingpt_ddp.training.run  # noqa: F401
    from mingpt_ddp.distributed.device.compile import should_compile
    from mingpt_ddp.distributed.device.device import total_memory
    from mingpt_ddp.errors import ConfigError
    from mingpt_ddp.metrics.mfu import vendor_peak_flops
    from mingpt_ddp.models.ops import DTYPES, resolve_device, resolve_precision

    where = resolve_device(device, "device")
    precision = resolve_precision("auto", where)
    name = torch.cuda.get_device_name(where) if device == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "memory_gib": round(total_memory(where) / 2**30, 1)}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "precision": precision}
    found["matmul_flops"] = measured_matmul_flops(where, DTYPES[precision])
    found["peak_flops"] = vendor_peak_flops(where, DTYPES[precision])
    try:
        should_compile(compose_config(f"trainer.device={device}", "trainer.compile=true"), where)
    except ConfigError as error:
        found["cannot_compile"] = str(error)
    return found


def flops_per_token(overrides: dict[str, list[str]], vocab_size: int) -> dict[str, float]:
    """Compute the FLOPs per token of the models that the overrides select, by their names."""
    import torch

    from mingpt_ddp import models

    found = {}
    for name, words in overrides.items():
        config = compose_config(*words)
        with torch.device("meta"):
            model = models.build_model(config.model, vocab_size, config.data.block_size)
        found[name] = models.flops_per_token(model) or 0.0
    return found


# Texts and runs.


def text_or_random(directory: Path, characters: int) -> tuple[Path, bool]:
    """Find tinyshakespeare, or write a random text with as many distinct characters.

    Returns:
        The path of the text, and True if it is tinyshakespeare.
    """
    if os.environ.get(TEXT_VARIABLE):
        return corpus_path(), True
    path = directory / "random.txt"
    alphabet = string.ascii_letters + string.digits + "\n ."
    path.write_text(alphabet + "".join(random.Random(TEXT_SEED).choices(alphabet, k=characters)))
    return path, False


@dataclass(frozen=True)
class Descent:
    """The validation losses of a training process.

    Attributes:
        losses: Seconds since the start, step, and loss in nats per character.
        first_step_s: Seconds until the first step was logged, or 0 if there was none.
        has_ended: True if the process ended by itself, and was not stopped.
    """

    losses: list[tuple[float, int, float]]
    first_step_s: float
    has_ended: bool = False

    @property
    def best(self) -> float:
        return min((loss for _, _, loss in self.losses), default=float("inf"))

    def seconds_to(self, target: float) -> float | None:
        return next((seconds for seconds, _, loss in self.losses if loss <= target), None)


def descend(
    part: Part, command: list[str], cwd: Path, report: str, step: str, target: float
) -> Descent:
    """Train until the validation loss reaches the target, or the command ends.

    Args:
        part: The part, which has the remaining time.
        command: The command that trains.
        cwd: Its working directory.
        report: Regular expression for a line with a validation loss, with groups for the step and
            the loss.
        step: Regular expression for the log line of a step.
        target: The loss at which the process is stopped.

    Raises:
        RuntimeError: The process ended without a validation loss.
    """
    begin, first, tail = time.monotonic(), 0.0, list[str]()
    losses: list[tuple[float, int, float]] = []
    has_ended = False
    with running(command, cwd, limit_s=part.left_s()) as (process, lines):
        for line in lines:
            tail, now = [*tail[-20:], line], time.monotonic() - begin
            if re.search(step, line):
                first = first or now
            if found := re.search(report, line):
                losses.append((round(now, 2), int(found[1]), float(found[2])))
                if losses[-1][2] <= target:
                    break
        else:
            has_ended = process.wait() == 0
    if not losses:
        raise RuntimeError(f"no validation loss was reported:\n{''.join(tail)}")
    return Descent(losses, round(first, 2), has_ended)


def digest_of_training(part: Part, command: list[str], run: Path, kill_at: int) -> str:
    """Train a run to its end, and return the digest of its last snapshot.

    Args:
        part: The part, which has the remaining time.
        command: The command that trains.
        run: Directory of the run.
        kill_at: Step from which the worker of rank 0 is killed once a snapshot exists. 0 does not
            kill it.

    Raises:
        RuntimeError: The run did not finish, or the worker was not restarted.
    """
    with running(command, part.scratch, limit_s=part.left_s()) as (process, lines):
        if kill_at:
            while last_step(run) < kill_at or not any(run.glob("snapshots/step_*/manifest.json")):
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{run.name} ended before step {kill_at}:\n{''.join(lines)[-2000:]}"
                    )
                time.sleep(0.005)
            os.kill(find_worker(process.pid, rank=0), signal.SIGKILL)
        output = "".join(lines)
        if process.wait() != 0:
            raise RuntimeError(f"{run.name} failed:\n{output[-2000:]}")
    if kill_at and "resuming from the snapshot of step" not in output:
        raise RuntimeError(f"{run.name} was not resumed:\n{output[-2000:]}")
    digest = hashlib.sha256()
    snapshot = max(run.glob("snapshots/step_*"))
    for name in ("model", "optimizer"):
        # There is one file, or a file for each rank.
        for file in sorted(snapshot.glob(f"{name}*.safetensors")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
