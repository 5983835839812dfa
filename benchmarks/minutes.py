"""Check how exactly trainer.max_minutes is kept, and that kills do not change its bits.

error    of each budget: the time that its steps took, by the train state, over the minutes, less 1;
         on a quiet machine, and beside a busy loop on every core
drift    of the machine: equal work timed for half a minute in blocks of half a second, about what
         the number of steps is taken from; how much longer the slowest tenth takes than the fastest
killed   a run that is killed before its number of steps is fixed, and four times after it, against
         a copy of it from then on that is not killed: the SHA-256 of model and optimizer

The exit code is 1 if the bits differ, or if a quiet error is above 5% where the drift is not: no
budget is kept more exactly than the machine keeps its pace.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/minutes.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, corpus_path, environment, log, parser, report

BUDGETS = (0.05, 0.1, 0.25, 0.5, 1.0)  # minutes
MOST = 0.05  # error of a quiet budget
WARMUP = 50  # steps, after which the number is fixed
EVERY = 20  # steps between snapshots
AT = (WARMUP - 5, WARMUP + 50, WARMUP + 80, WARMUP + 110, WARMUP + 140)  # kills: after these steps
PATIENCE_S = 300.0
BLOCKS = 60
BLOCK_S = 0.5


def drift() -> float:
    """Return the drift of the machine, as a share."""
    matrix = torch.ones(256, 256)
    paces = []
    for _ in range(BLOCKS):
        begin = time.perf_counter()
        products = 0
        while (now := time.perf_counter()) < begin + BLOCK_S:
            torch.mm(matrix, matrix)
            products += 1
        paces.append((now - begin) / products)
    tenths = statistics.quantiles(paces, n=10)
    return tenths[-1] / tenths[0] - 1


def command(name: str, minutes: float) -> list[str]:
    words = [
        "data=shakespeare",
        f"data.path={corpus_path()}",
        "data.sha256=null",
        "model=gpt_nano",
        "data.block_size=64",
        "trainer.batch_size=12",
        "trainer.device=cpu",
        "trainer.eval_every=200",
        "trainer.eval_steps=5",
        f"snapshot.every_steps={EVERY}",
        f"optimizer.warmup_steps={WARMUP}",
        f"trainer.max_minutes={minutes}",
        f"run.name={name}",
    ]
    return [sys.executable, str(ROOT / "main.py"), *words]


def newest(run: Path) -> dict[str, Any]:
    """Return the state of the newest snapshot; {} without one."""
    manifests = sorted(run.glob("snapshots/*/manifest.json"))
    if not manifests:
        return {}
    state: dict[str, Any] = json.loads((manifests[-1].parent / "state.json").read_text())
    return state["train_state"]


@contextlib.contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    """Let a busy loop run on every core in this context."""
    count = len(os.sched_getaffinity(0)) if is_busy else 0
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def error_of(minutes: float, name: str, scratch: Path) -> dict[str, Any]:
    """Train for so many minutes; return what its steps took."""
    begin = time.perf_counter()
    subprocess.run(
        command(name, minutes), cwd=scratch, env=environment(), check=True, capture_output=True
    )
    state = newest(scratch / "outputs" / name)
    took = state["timed_seconds"] * state["step"] / state["timed_steps"] / 60
    found = {
        "minutes": minutes,
        "steps": state["step"],
        "took": took,
        "error": took / minutes - 1,
        "process_s": time.perf_counter() - begin,
    }
    log(f"{name}: {found}")
    return found


def kill_after(step: int, words: list[str], run: Path) -> None:
    """Start the command, and SIGKILL it when it has a snapshot of a later step."""
    process = subprocess.Popen(
        words, cwd=run.parent.parent, env=environment(), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + PATIENCE_S
    while newest(run).get("step", 0) < step - step % EVERY:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{run} has no snapshot of step {step}")
        time.sleep(0.005)
    process.kill()
    process.wait()


def bits(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the tensors of the newest snapshot."""
    newest_snapshot = max(run.glob("snapshots/*/manifest.json")).parent
    files = sorted(newest_snapshot.glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def killed(scratch: Path, minutes: float) -> dict[str, Any]:
    """Kill a run five times; compare its bits with those of a copy from the second kill on."""
    words = command("killed", minutes)
    runs = {name: scratch / name / "outputs" / "killed" for name in ("killed", "copy")}
    (scratch / "killed").mkdir()
    steps = []
    for number, step in enumerate(AT):
        kill_after(step, words, runs["killed"])
        steps.append(newest(runs["killed"])["step"])
        if number == 1:
            shutil.copytree(scratch / "killed", scratch / "copy")
    for run in runs.values():
        subprocess.run(
            words, cwd=run.parent.parent, env=environment(), check=True, capture_output=True
        )
    found = {name: bits(run) for name, run in runs.items()}
    state = newest(runs["killed"])
    result = {
        "killed_at": steps,
        "steps": state["step"],
        "same_bits": found["killed"] == found["copy"],
        "bits": found,
    }
    log(f"killed: {result}")
    return result


def main() -> None:
    options = parser(__doc__, "minutes").parse_args()
    errors: dict[str, list[dict[str, Any]]] = {}
    drifted = drift()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for load in ("quiet", "busy"):
            with busy(load == "busy"):
                errors[load] = [error_of(m, f"{load}-{m}", scratch) for m in BUDGETS]
        kills = killed(scratch, BUDGETS[2])
    rows = [["drift of the machine", "", "", f"{drifted:.1%}"]]
    for load, found in errors.items():
        for each in found:
            cells = (load, each["minutes"], each["steps"], f"{each['error']:+.1%}")
            rows.append([str(cell) for cell in cells])
    same = "the same bits" if kills["same_bits"] else "other bits"
    rows.append(["killed five times", str(BUDGETS[2]), str(kills["steps"]), same])
    report(
        options.out,
        {"drift": drifted, "errors": errors, "killed": kills},
        ["machine", "minutes", "steps", "error"],
        rows,
    )
    worst = max(abs(each["error"]) for each in errors["quiet"])
    sys.exit(worst > MOST >= drifted or not kills["same_bits"])


if __name__ == "__main__":
    main()
