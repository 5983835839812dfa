"""Run the program's commands in subprocesses, kill them, and read the files that they write."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from forked import start_command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent.parent
MAIN = [sys.executable, str(ROOT / "main.py")]
SAMPLE = [sys.executable, str(ROOT / "sample.py")]
SNAPSHOTS = [sys.executable, "-m", "mingpt_ddp", "snapshots"]
REPORT = [sys.executable, "-m", "mingpt_ddp", "report"]
AT = [sys.executable, "-m", "mingpt_ddp", "at"]

TIMEOUT_S = 300  # limit for one command, which normally takes a few seconds
STEPS = 80
SNAPSHOT_FILES = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}

PHRASES = ["the king is dead", "long live the queen", "a horse, a horse", "to be or not to be", "what light is that?"]


def torchrun(ranks: int, *options: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*command, *options, str(ROOT / "main.py")]


def write_text(path: Path, characters: int = 60_000) -> Path:
    """Write a text of 24 distinct characters, which is the same on every machine."""
    generator = random.Random(1)
    pieces = [generator.choice(PHRASES) + generator.choice([".\n", ", ", "; "]) for _ in range(characters // 10)]
    path.write_text("".join(pieces)[:characters], encoding="utf-8")
    return path


def settings(text: Path | str, **other: Any) -> list[str]:
    """Return the overrides of a small run of three epochs.

    A step takes about 10 ms, so that a test can kill the run before it is complete.

    Args:
        text: Path of the text.
        other: Further overrides. In their names, `__` stands for a dot.
    """
    values = {
        "model": "gpt_nano",
        "model.n_layer": 2,
        "model.n_embd": 48,
        "model.dropout": 0.1,
        "data": "text_file",
        "data.path": text,
        "data.block_size": 64,
        "optimizer.lr": "1e-3",
        "optimizer.warmup_steps": 2,
        "optimizer.schedule_steps": STEPS,
        "trainer.max_epochs": "null",
        "trainer.max_steps": STEPS,
        "trainer.batch_size": 24,
        "trainer.precision": "fp32",
        "trainer.device": "cpu",
        "trainer.log_every": 1,
        "trainer.eval_every": 25,
        "snapshot.every_steps": 8,
        "run.name": "run",
    }
    values |= {key.replace("__", "."): value for key, value in other.items()}
    return [f"{key}={value}" for key, value in values.items()]


# Processes


def environment(**extra: str) -> dict[str, str]:
    """Return environment variables without those of launchers. This checkout precedes an installed package."""
    unset = r"RANK$|WORLD_SIZE$|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC|SLURM_|HYDRA_|AWS_"
    inherited = {key: value for key, value in os.environ.items() if not re.match(unset, key)}
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    return {**inherited, **variables, **extra}


def call(command: list[str], cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to completion. Standard output and error are both in `stdout`."""
    with started(command, cwd, **extra) as job:
        code = job.wait()
        return subprocess.CompletedProcess(command, code, job.text())


def succeed(command: list[str], cwd: Path, **extra: str) -> str:
    """Run a command to completion, check that its exit code is 0, and return the output."""
    done = call(command, cwd, **extra)
    assert done.returncode == 0, done.stdout
    return done.stdout


class Job:
    """A command in the background. Its processes are all those that write their output to its file."""

    def __init__(self, command: list[str], cwd: Path, **extra: str) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # not in the working directory, where nothing may be written
        path = Path(f"/proc/{os.getpid()}/fd/{self.output.fileno()}")
        self.process = start_command(command, cwd, environment(**extra), path)

    def processes(self) -> list[int]:
        """Return the ids of all its processes that are alive, including the launched one."""
        output, alive = os.fstat(self.output.fileno()), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # the process has ended or belongs to another user
                    if any(os.path.samestat(os.stat(entry / "fd" / stream), output) for stream in "12"):
                        alive.append(int(entry.name))
        return alive

    def worker(self, rank: int) -> int:
        """Return the id of the process that has the log of this global rank open."""
        found = [
            pid for pid in self.processes() if any(path.endswith(f"/main.rank{rank}.log") for path in open_files(pid))
        ]
        assert len(found) == 1, f"processes of rank {rank}: {found}\n{self.text()}"
        return found[0]

    def kill_worker(self, rank: int) -> None:
        os.kill(self.worker(rank), signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL every process, the launched one first, so that it cannot restart the others."""
        deadline = time.monotonic() + 60
        self.process.kill()
        while alive := self.processes():
            assert time.monotonic() < deadline, f"still alive: {alive}"
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def kill_launcher(self) -> None:
        """SIGKILL only the launched process. Wait until the workers have noticed it and exited."""
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not self.processes(), "the orphaned workers to exit")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, which must come true before the command ends."""
        wait_for(lambda: condition() or self.process.poll() is not None, what)
        assert self.process.poll() is None, f"the command ended while waiting for {what}:\n{self.text()}"

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"hang: still running after {TIMEOUT_S} s:\n{self.text()}") from None

    def text(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), size, 0).decode(errors="replace")


@contextlib.contextmanager
def started(command: list[str], cwd: Path, **extra: str) -> Iterator[Job]:
    """Run a command in the background, and kill all its processes at the end of the block."""
    job = Job(command, cwd, **extra)
    try:
        yield job
    finally:
        job.kill_all()
        job.output.close()


def open_files(pid: int) -> list[str]:
    """Return the paths that a process has open."""
    paths = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                paths.append(os.readlink(descriptor))
    return paths


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {TIMEOUT_S} s waiting for {what}"
        time.sleep(0.01)


# Files of a run directory


def result(run: Path) -> dict[str, Any]:
    content = json.loads((run / "result.json").read_text())
    assert isinstance(content, dict)
    return content


def committed(run: Path) -> list[int]:
    """Return the steps of the snapshots that have a manifest."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run.glob("snapshots/step_*/manifest.json"))


def weights(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """Return the files of the model and the optimizer as bytes."""
    snapshot = run / "snapshots" / f"step_{step:08d}"
    return {name: (snapshot / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def digests(run: Path, step: int = STEPS) -> dict[str, str]:
    """Return the SHA-256 of the model and the optimizer, which is easy to read in a failed comparison."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in weights(run, step).items()}


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def records(run: Path) -> list[tuple[int, float]]:
    """Return the step and training loss of each record of metrics.jsonl, in the order written."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # SIGKILL has truncated the line, or it is being written
                record = json.loads(line)
                if "train_loss" in record:
                    found.append((record["step"], record["train_loss"]))
    return found


def last_step(run: Path) -> int:
    """Return the step that was recorded last, or 0."""
    return max([step for step, _ in records(run)[-1:]], default=0)


def curve(run: Path) -> dict[int, float]:
    """Return the training loss by step. If a step has several records, the last one counts."""
    return dict(records(run))


def check_not_trained_twice(run: Path, step: int) -> None:
    """Check that no step up to `step` was trained again, since its snapshot was committed before every kill."""
    assert step > 0
    first = [number for number, _ in records(run) if number <= step]
    assert first == list(range(1, step + 1)), "steps before the snapshot were trained again, or are missing"


def tensorboard(run: Path, rank: int) -> list[tuple[int, float]]:
    """Return the training loss curve of a rank as TensorBoard reads it."""
    events = EventAccumulator(str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def check_equal_runs(run: Path, reference: Path, ranks: int) -> None:
    """Check that a complete run has the same bytes, losses and curves as the uninterrupted run."""
    actual, expected = result(run), result(reference)
    assert actual["status"] == expected["status"] == "complete"
    assert actual["world_size"] == ranks
    assert digests(run) == digests(reference)
    for key in ("step", "epoch", "train_loss", "val_loss", "best_val_loss"):
        assert actual[key] == expected[key], key
    assert curve(run) == curve(reference)
    for rank in range(ranks):
        points = tensorboard(run, rank)
        assert [step for step, _ in points] == list(range(1, STEPS + 1)), "a step is duplicated or missing"
        assert points == tensorboard(reference, rank)


def contains_value(output: str, value: float) -> bool:
    """Return True if the output contains the value, rounded to three or more decimals."""
    numbers = re.findall(r"\d+\.\d{3,}", output)
    return any(abs(float(number) - value) <= 0.5 * 10 ** -len(number.split(".")[1]) + 1e-9 for number in numbers)


def one_error_line(output: str) -> str:
    """Check that the output is one line without a traceback. Return the line."""
    lines = [line for line in output.splitlines() if line.strip()]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]
