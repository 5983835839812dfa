"""Launches that pause at a named point: a sitecustomize module on PYTHONPATH patches the package in
every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from launching import TINY, Job, open_files, wait_for

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.training.run import train_run

STEPS = 24
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=10",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "snapshot.every_steps=null",
    "snapshot.keep_best=false",
    "run.name=run",
]

# Patches modules of the package right after their import, or at once: `PATCHES` maps module names
# to functions.
SITE = '''
import importlib.abc, importlib.util, os, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def touch(name):
    (HERE / name).touch()

def mine(name):
    """Return the name of a marker of this rank, which a forked worker gets after the import of this module."""
    return f"{name}.{os.environ.get('RANK', '0')}"

def pause(name):
    """Report that this rank has reached the point, and wait; only once over all attempts."""
    if not (HERE / mine(name)).exists():
        (HERE / mine(name)).write_text(str(os.getpid()))
        while not (HERE / "go").exists():
            time.sleep(0.01)

PATCHES = {}
exec((HERE / "patches.py").read_text())

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        patch = PATCHES.pop(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

for name in [name for name in PATCHES if name in sys.modules]:  # before a fork
    PATCHES.pop(name)(sys.modules[name])
sys.meta_path.insert(0, Finder())
'''  # noqa: E501

REPORT_SIGNALS = """
def report_signals(signals):
    handle = signals.SignalHandler._handle
    def handle_and_report(self, number, frame):
        handle(self, number, frame)
        touch(mine("signal"))
    signals.SignalHandler._handle = handle_and_report
PATCHES["mingpt_ddp.distributed.signals"] = report_signals
"""


# Ranks stop before a step: `HELD` has these by step.
HOLD = """
def hold(trainer):
    original = trainer.Trainer._train
    def train(self, step):
        if <held>.get(step) == int(os.environ.get("RANK", "0")):
            pause(f"step{step}")
        return original(self, step)
    trainer.Trainer._train = train
PATCHES["mingpt_ddp.training.trainer"] = hold
"""


def patches(text: str, **values: Any) -> str:
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return REPORT_SIGNALS + text


class PausedJob:
    """A launch that pauses at the points where `patches` calls `pause`."""

    start = Job
    settings = SETTINGS

    def __init__(
        self, command: list[str], cwd: Path, patches: str, *options: str, **extra: str
    ) -> None:
        self.site = cwd / f"site-{time.monotonic_ns()}"
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE)
        (self.site / "patches.py").write_text(patches)
        self.job = self.start(
            [*command, *self.settings, *options], cwd, PYTHONPATH=str(self.site), **extra
        )

    def wait_until(self, point: str, *ranks: int) -> None:
        """Wait until these ranks, by default rank zero, have reached the point."""
        for rank in ranks or (0,):
            marker = self.site / f"{point}.{rank}"
            wait_for(
                lambda: marker.exists() or self.job.process.poll() is not None,  # noqa: B023
                what=marker.name,
            )
            assert marker.exists(), f"ended before {marker.name}:\n{self.job.text()}"

    def wait_until_marked(self, point: str, *ranks: int) -> None:
        """Wait until these ranks have reached the point, whether or not the launch has ended."""
        for rank in ranks:
            marker = self.site / f"{point}.{rank}"
            wait_for(marker.exists, what=marker.name)

    def process_at(self, point: str, rank: int = 0) -> int:
        """Return the id of the process of a rank that has reached the point."""
        marker = self.site / f"{point}.{rank}"
        wait_for(marker.read_text, what=f"the process id in {marker.name}")
        return int(marker.read_text())

    def resume(self) -> None:
        (self.site / "go").touch()

    def wait(self) -> int:
        return self.job.wait()


class HeldJob(PausedJob):
    """A launch in which a rank stops before a step, until it is killed; only once over all
    attempts. Snapshots are written meanwhile.
    """

    settings: ClassVar[list[str]] = []

    def __init__(self, command: list[str], cwd: Path, held: dict[int, int], **extra: str) -> None:
        """
        Args:
            held: the rank that stops, by step.
        """
        super().__init__(command, cwd, patches(HOLD, held=held), **extra)
        self.held = held

    def wait_for_step(self, step: int, is_saved: Callable[[], Any]) -> None:
        """Wait until the rank has stopped before the step, and there is a snapshot."""
        self.wait_until(f"step{step}", self.held[step])
        wait_for(is_saved, what=f"a snapshot before step {step}")


def kill_before(step: int, command: list[str], cwd: Path, is_saved: Callable[[], Any]) -> None:
    """Launch a run, and SIGKILL all of it while it waits before a step, after a snapshot."""
    held = HeldJob(command, cwd, {step: 0})
    held.wait_for_step(step, is_saved)
    held.job.kill_tree()


def worker(job: Job, rank: int) -> int:
    """Return the process id of a rank."""
    log = f"/main.rank{rank}.log"
    return next(pid for pid in job.workers() if any(path.endswith(log) for path in open_files(pid)))


def weights(run: Path, step: int = STEPS) -> bytes:
    return (run / "snapshots" / f"step_{step:08d}" / "model.safetensors").read_bytes()


def train(values: dict[str, Any]) -> float | None:
    config = from_mapping(values)
    logs.to_console(read_env())
    runtime = Runtime(config, read_env())
    loss = train_run(config, runtime, {})
    runtime.close()
    return loss
