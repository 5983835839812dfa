"""Launch the program in subprocesses as users do, and kill some or all of its processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from forked import ROOT, TEMPLATE, run_command, start_command, start_new_process

# After this many seconds a process is considered hung, even on a slow and busy machine. No test
# measures time.
PATIENCE_S = 400
# Puts the presets of an example on Hydra's search path.
WITH_DIGITS = f"hydra.searchpath=[{ROOT}/examples/digits]"
WITH_TOY = f"hydra.searchpath=[{ROOT}/examples/toy]"
# Runs use fp32 on every machine. Some CPUs default to bf16, where another order of summation
# changes the third digit of a loss.
TINY = [
    "model=gpt_nano",
    "model.n_layer=2",
    "model.n_embd=24",
    "data.block_size=16",
    "data.truncate=0.02",
    "trainer.max_epochs=null",
    "trainer.max_steps=12",
    "trainer.batch_size=12",
    "trainer.precision=fp32",
    "trainer.log_every=1",
    "trainer.eval_every=6",
    "snapshot.every_steps=4",
    "optimizer.warmup_steps=2",
]


def environment(cwd: Path, **extra: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not re.match(r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC", k)
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def torchrun(n: int, *options: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={n}",
    ]
    return [*command, *options, str(ROOT / "main.py")]


def python_main() -> list[str]:
    return [sys.executable, str(ROOT / "main.py")]


def call(
    command: list[str], cwd: Path, timeout: float = PATIENCE_S, separate: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion.

    Standard output and error are both in `stdout`, unless `separate` is True.
    """
    return run_command(command, cwd, environment(cwd, **extra), timeout, separate)


def with_code(directory: Path, code: str) -> str:
    """Write a sitecustomize module that runs `code` in every process. Return its PYTHONPATH."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(code)
    return f"{directory}{os.pathsep}{ROOT}"


def copy_source(target: Path) -> None:
    """Copy the files from which the package is built to a new directory."""
    for name in ("mingpt_ddp", "hydra_plugins", "conf"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)


def write_application(directory: Path) -> None:
    """Write the Hydra application of docs/python.md to a directory."""
    page = (ROOT / "docs" / "python.md").read_text()
    section = page.partition("## In a Hydra application of your own")[2]
    (directory / "conf").mkdir()
    for name, language in (("conf/config.yaml", "yaml"), ("app.py", "py")):
        block = section.partition(f"```{language}\n")[2].partition("```")[0]
        (directory / name).write_text(block)


class Job:
    """A launch in the background, with helpers to inspect it and to kill parts of it."""

    started: ClassVar[list[Job]] = []
    start = staticmethod(start_command)

    def __init__(self, command: list[str], cwd: Path, **extra: str) -> None:
        self.command, self.output = command, cwd / f"output-{time.monotonic_ns()}.txt"
        self.process = self.start(command, cwd, environment(cwd, **extra), self.output)
        self.started.append(self)

    def workers(self) -> list[int]:
        return workers(self.process.pid, "torch.distributed.run" in self.command)

    def kill_worker(self, index: int) -> None:
        os.kill(self.workers()[index], signal.SIGKILL)

    def kill_agent(self) -> list[int]:
        """SIGKILL only the launched process. Return the process ids of its workers."""
        workers = self.workers()
        self.process.kill()
        self.process.wait()
        return workers

    def kill_tree(self) -> None:
        for pid in [*self.workers(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()


class UnforkedJob(Job):
    """A launch in a new process that imports torch itself."""

    start = staticmethod(start_new_process)


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def workers(launcher: int, is_torchrun: bool) -> list[int]:
    """Return the process ids of the workers in the order of their local ranks.

    Args:
        launcher: Process id of torchrun's agent, or of a launch with `ddp.nproc_per_node`.
        is_torchrun: The launcher is torchrun. Otherwise, a fork server may be the workers' parent.
    """
    if is_torchrun:
        return [pid for pid in children(launcher) if read(pid, "comm").strip() != TEMPLATE]
    descendants = [
        child for parent in [launcher, *children(launcher)] for child in children(parent)
    ]
    return [pid for pid in descendants if read(pid, "comm").startswith("rank ")]


def read(pid: int, name: str | Path) -> str:
    """Read a file of a process under /proc."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # the process has ended
        return ""


def open_files(pid: int) -> list[str]:
    """Return the paths and sockets that a process has open."""
    links = []
    # The file was closed meanwhile, or the process has ended. A later call sees the rest.
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            links.append(os.readlink(path))
    return links


def is_running(pid: int) -> bool:
    """Return True if a process is alive. A zombie, which has ended but was not reaped, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, timeout: float = PATIENCE_S, what: str = "the condition") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            # Show the last jobs, which this test has started: one may have ended too early.
            jobs = "\n--- ".join(job.text()[-3000:] for job in Job.started[-3:])
            raise AssertionError(
                f"timed out after {timeout} s waiting for {what}; the last jobs wrote:\n--- {jobs}"
            )
        time.sleep(0.005)


def hashes(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def committed(run: Path) -> list[int]:
    """Return the steps of the committed snapshots of a run directory."""
    return sorted(
        int(manifest.parent.name[5:]) for manifest in run.glob("snapshots/step_*/manifest.json")
    )


def last_step(run: Path) -> int:
    """Return the step that rank zero logged last, over all attempts."""
    try:
        steps = re.findall(r"step (\d+)/", (run / "main.rank0.log").read_text())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0
