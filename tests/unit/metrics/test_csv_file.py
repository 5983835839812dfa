"""metrics.csv: a row per step, also after kills and rollbacks."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.metrics.jsonl import METRICS, JSONLLogger
from mingpt_ddp.metrics.trackers.csv_file import NAME, CSVLogger

CONFIG = from_mapping(configure())


class Sinks:
    """The two files of one attempt."""

    def __init__(self, directory: Path, step: int) -> None:
        self.sinks = [JSONLLogger(directory / METRICS), CSVLogger(directory)]
        for sink in self.sinks:
            sink.start(step, world_size=1)

    def train(self, steps: range, loss: float) -> None:
        for step in steps:
            for sink in self.sinks:
                sink.log(step, {"train/loss": loss, "train/lr": 1e-3})
            for sink in self.sinks if step % 4 == 0 else ():
                sink.log(step, {"val/loss": loss + 1})


def read(directory: Path) -> list[tuple[int, float, float | None]]:
    with open(directory / NAME, newline="") as file:
        rows = [*csv.DictReader(file)]
    return [
        (int(r["step"]), float(r["train_loss"]), float(r["val_loss"]) if r["val_loss"] else None)
        for r in rows
    ]


def expected(*parts: tuple[range, float]) -> list[tuple[int, float, float | None]]:
    return [
        (step, loss, loss + 1 if step % 4 == 0 else None) for steps, loss in parts for step in steps
    ]


def test_a_row_per_step(tmp_path):
    Sinks(tmp_path, 0).train(range(1, 10), 2.5)
    assert read(tmp_path) == expected((range(1, 10), 2.5))
    assert (tmp_path / NAME).read_bytes().splitlines()[0] == b"step,train_loss,lr,val_loss"


@pytest.mark.parametrize("torn", ["", "11,2.", "11,2.5,0.001,,\r\n12"])
def test_a_restart_and_a_rollback_leave_each_step_once(tmp_path, torn):
    Sinks(tmp_path, 0).train(range(1, 11), 1.0)
    with open(tmp_path / NAME, "a") as file:
        file.write(torn)
    sinks = Sinks(tmp_path, 6)
    assert read(tmp_path) == expected((range(1, 7), 1.0))
    sinks.train(range(7, 10), 2.0)
    for sink in sinks.sinks:
        sink.rollback(8)
    sinks.train(range(9, 13), 3.0)
    sinks.sinks[1].complete(12, CONFIG)
    assert read(tmp_path) == expected((range(1, 7), 1.0), (range(7, 9), 2.0), (range(9, 13), 3.0))


def test_an_unwritable_file_is_reported_once(tmp_path, log_lines):
    sinks = Sinks(tmp_path, 0)
    (tmp_path / NAME).unlink(missing_ok=True)
    (tmp_path / NAME).mkdir()
    sinks.train(range(1, 4), 1.0)
    (line,) = log_lines
    assert line.startswith(f"WARNING cannot write {tmp_path / NAME}, training continues without it")
