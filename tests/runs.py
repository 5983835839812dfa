"""Run the commands of a user and read the files of a run. Imports nothing from the package."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from launching import ROOT, call, python_main
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Record = dict[str, Any]


def tool(name: str, *words: str) -> list[str]:
    """Return a command of the program other than training."""
    return [sys.executable, "-m", "mingpt_ddp", name, *words]


def succeed(command: list[str], cwd: Path, **extra: str) -> str:
    """Run a command to completion, check that its exit code is 0, and return its output."""
    cwd.mkdir(parents=True, exist_ok=True)
    done = call(command, cwd, **{"PYTHONPATH": str(ROOT), **extra})
    assert done.returncode == 0, done.stdout
    return done.stdout


def fail(command: list[str], cwd: Path, code: int = 2, **extra: str) -> str:
    """Run a command to completion, check its exit code, and return its output."""
    done = call(command, cwd, **{"PYTHONPATH": str(ROOT), **extra})
    assert done.returncode == code, done.stdout
    return done.stdout


def train(cwd: Path, *words: str, **extra: str) -> Path:
    """Train a run named `run` in a working directory. Return the run directory."""
    succeed([*python_main(), *words, "run.name=run"], cwd, **extra)
    return cwd / "outputs" / "run"


def error_line(output: str, prefix: str = "") -> str:
    """Check that the output is one line that begins with `prefix`. Return the line."""
    lines = output.splitlines()
    assert len(lines) == 1 and lines[0].startswith(prefix), output
    return lines[0]


def write_files(directory: Path, files: dict[str, str]) -> Path:
    """Write files, given as texts by relative path. Return the directory."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return directory


def read_result(run: Path) -> Record:
    """Return the content of result.json."""
    return json.loads((run / "result.json").read_text())


def recorded_config(run: Path) -> dict[str, Any]:
    """Return the configuration that the last start of a run recorded."""
    later = sorted(run.glob("config.*.yaml"), key=lambda path: int(path.name.split(".")[1]))
    return yaml.safe_load([run / "config.yaml", *later][-1].read_text())


@dataclass
class History:
    """The records of metrics.jsonl that led to the last step."""

    rows: list[Record] = field(default_factory=list)
    starts: int = 0
    is_complete: bool = False

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return the step and value of each record that has this key."""
        return [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]

    def by_step(self) -> dict[int, Record]:
        """Merge the records of each step into one."""
        records: dict[int, Record] = {}
        for row in self.rows:
            records[row["step"]] = records.get(row["step"], {}) | row
        return records


def read_history(run: Path) -> History:
    """Read metrics.jsonl without the records that a later start replaced.

    A start repeats the steps after the one that it resumed from. The last line may be partial.
    """
    found = History()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # SIGKILL has truncated the line, or it is being written
            continue
        while found.rows and found.rows[-1]["step"] > record["step"]:
            found.rows.pop()
        if "start" in record:
            found.starts += 1
        found.is_complete = "complete" in record
        if not record.keys() & {"start", "rollback", "complete"}:
            found.rows.append(record)
    return found


def tensor_files(run: Path, step: int | None = None) -> dict[str, bytes]:
    """Return the tensor files of a committed snapshot by name. The default is the newest one."""
    if step is None:
        snapshot = max(run.glob("snapshots/*/manifest.json")).parent
    else:
        snapshot = run / "snapshots" / f"step_{step:08d}"
    found = {path.name: path.read_bytes() for path in sorted(snapshot.glob("*.safetensors"))}
    assert found, snapshot
    return found


def weights(run: Path, step: int | None = None) -> bytes:
    """Return the model's file from a committed snapshot. The default is the newest one."""
    return tensor_files(run, step)["model.safetensors"]


def verified_steps(url: str | Path, cwd: Path) -> list[int]:
    """Check that all snapshots in a directory or a store are whole. Return their steps."""
    text = succeed(tool("snapshots", "verify", str(url)), cwd)
    return [int(step) for step in re.findall(r"step_(\d+): whole$", text, re.MULTILINE)]


def curve(run: Path, tag: str = "train/loss", rank: int = 0) -> list[tuple[int, float]]:
    """Return the points of a curve as TensorBoard reads them: step and value."""
    directory = run / "tensorboard" / f"rank{rank}"
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]
