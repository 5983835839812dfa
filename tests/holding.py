"""Hold the ranks of a run before a step, so that a test can kill or signal them there.

A hook in a user's file holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launching import TINY, Job, open_files, wait_for
from runs import write_files

STEPS = 24
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=10",
    "trainer.device=cpu",
    "snapshot.every_steps=null",
    "snapshot.keep_best=false",
    "run.name=run",
]

# The first step before which ranks can be held, since hooks are tried out with steps 1 to 4.
FIRST_STEP = 6
HOOK = '''
import ctypes, os, signal, time
from pathlib import Path
from mingpt_ddp.registry import acts

HERE = Path(__file__).parent

def rank():
    return int(os.environ.get("RANK", "0"))

def touch(name):
    (HERE / name).touch()

def pause(name):
    """Report that this rank has reached the point, and wait. Each rank does so only once."""
    marker = HERE / f"{name}.{rank()}"
    if not marker.exists():
        report_signals()
        marker.write_text(str(os.getpid()))
        while not (HERE / "go").exists():
            time.sleep(0.01)

def report_signals():
    """Touch a file whenever this rank has handled a signal."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if callable(handler := signal.getsignal(number)):
            signal.signal(number, reporting(handler))

def reporting(handler):
    def handle(number, frame):
        handler(number, frame)
        touch(f"signal.{rank()}")
    return handle

def sleep_for_ever():
    while True:
        time.sleep(1)

@acts("update")
def hold(step, weights):
    if step >= 5:
        reach(step + 1, rank())
'''
PAUSE_AT = """
def reach(step, rank):
    if step == <step>:
        pause("step<step>")
"""
HOLD = """
def reach(step, rank):
    if <held>.get(step) == rank:
        pause(f"step{step}")
"""
# A user's model that calls `forward_begins` with the number of the step.
SCORES = """
import torch
from torch import nn
from torch.nn import functional as F
from mingpt_ddp.registry import ModelConfig, register

@register("model", "scores", ModelConfig)
class Scores(nn.Module):
    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, tokens, targets=None):
        self.step += self.training
        forward_begins(int(self.step), self.training)
        logits = self.scores(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def reach(step, rank):
    pass
"""
# A user's file that kills the process during the update of step KILL_AT (a variable).
KILL_HOOK = """
import os, signal
from mingpt_ddp.registry import acts

@acts("update")
def kill(step, weights):
    if step == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def with_scores(words: list[str], cwd: Path) -> list[str]:
    """Write a preset for the model in SCORES. Return the words of a run that uses it.

    The caller still has to name the file with the code.
    """
    preset = {"mine/model/scores.yaml": "{name: scores, architecture: scores, code: null}"}
    kept = [word for word in words if not word.startswith("model")]
    return [*kept, f"--config-dir={write_files(cwd, preset)}/mine", "model=scores"]


def pause_at(step: int) -> str:
    """Return the code of a `reach` function that pauses all ranks before a step."""
    assert step >= FIRST_STEP
    return PAUSE_AT.replace("<step>", str(step))


class HeldRun:
    """A launch whose ranks call a function at the end of each step, before the next one."""

    def __init__(
        self,
        command: list[str],
        cwd: Path,
        reach: str,
        *words: str,
        group: str = "optimizer",
        **extra: str,
    ) -> None:
        """
        Args:
            reach: Code that defines `reach(step, rank)`. It may call the functions of HOOK.
            group: Configuration group that names the hook as its code.
        """
        self.site = cwd / f"site-{time.monotonic_ns()}"
        self.site.mkdir(parents=True)
        (self.site / "hold.py").write_text(HOOK + reach)
        code = f"+{group}.code={self.site}/hold.py"
        self.job = Job([*command, *words, code], cwd, **extra)

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
        """Wait until a rank has reached the point. Return its process id."""
        marker = self.site / f"{point}.{rank}"
        wait_for(marker.read_text, what=f"the process id in {marker.name}")
        return int(marker.read_text())

    def resume(self) -> None:
        (self.site / "go").touch()

    def wait(self) -> int:
        return self.job.wait()


class HeldJob(HeldRun):
    """A launch in which a rank stops before a step until it is killed.

    It stops only once over all attempts. Snapshots are still written meanwhile.
    """

    def __init__(
        self, command: list[str], cwd: Path, held: dict[int, int], *words: str, **named: Any
    ) -> None:
        """
        Args:
            held: For each step before which a rank stops, the number of the rank.
        """
        assert min(held, default=FIRST_STEP) >= FIRST_STEP
        super().__init__(command, cwd, HOLD.replace("<held>", str(held)), *words, **named)
        self.held = held

    def wait_for_step(self, step: int, is_saved: Callable[[], Any]) -> None:
        """Wait until the rank has stopped before the step and a snapshot exists."""
        self.wait_until(f"step{step}", self.held[step])
        wait_for(is_saved, what=f"a snapshot before step {step}")


def kill_before(
    step: int, command: list[str], cwd: Path, is_saved: Callable[[], Any], **named: Any
) -> None:
    """Launch a run, and SIGKILL all its processes before a step, once it has a snapshot."""
    held = HeldJob(command, cwd, {step: 0}, **named)
    held.wait_for_step(step, is_saved)
    held.job.kill_tree()


def worker(job: Job, rank: int) -> int:
    """Return the process id of a rank."""
    log = f"/main.rank{rank}.log"
    return next(pid for pid in job.workers() if any(path.endswith(log) for path in open_files(pid)))
