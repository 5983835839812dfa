"""metrics.jsonl: writing it, reading it after kills, and refusing damaged lines."""

from __future__ import annotations

import json
import math
import random
import resource

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics import jsonl
from mingpt_ddp.metrics.jsonl import (
    METRICS,
    HistoryEnd,
    JSONLLogger,
    read_end,
    read_history,
)

CONFIG = from_mapping(configure())


@pytest.fixture
def path(tmp_path):
    return tmp_path / METRICS


def train(history: JSONLLogger, steps: range, loss: float) -> None:
    for step in steps:
        history.log(step, {"train/loss": loss, "train/lr": 1e-3})
        if step % 4 == 0:
            history.log(step, {"val/loss": loss})


def test_each_line_is_one_json_object(path):
    history = JSONLLogger(path)
    history.start(0, world_size=2)
    metrics = {"train/grad_norm": 0.5, "train/loss": 2.5, "speed/tokens_per_s": 4000.0}
    history.log(10, {**metrics, "speed/step_ms": 8.0, "train/lr": 1e-3})
    history.log(20, {"val/loss": 2.75, "val/acc{x}": 4.0, "speed/mfu": 0.125})
    history.log(30, {"train/loss": math.nan, "train/lr": 1e-3, "train/grad_norm": math.inf})
    history.complete(30, CONFIG)
    lines = path.read_text().splitlines()
    start, *records, complete = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert start.pop("start") == pytest.approx(complete.pop("complete"), abs=60)
    assert (start, complete) == ({"step": 0, "world_size": 2}, {"step": 30})
    trained = {"step": 10, "train_loss": 2.5, "lr": 1e-3, "grad_norm": 0.5}
    trained |= {"tokens_per_s": 4000.0, "step_ms": 8}
    assert records == [
        trained,
        {"step": 20, "mfu": 0.125, "val_loss": 2.75, "val_acc{x}": 4.0},
        {"step": 30, "train_loss": None, "lr": 1e-3, "grad_norm": None},
    ]
    assert list(records[0]) == [*trained], "in this order"
    found = read_history(path)
    assert found.rows == records
    assert found.series("train_loss") == [(10, 2.5)], "without what is not finite"


def test_records_have_the_tags_of_their_metrics():
    metrics = {
        "train/loss": 2.5,
        "train/loss_kl": 0.5,
        "speed/goodput": 0.9,
        "val/bits_per_char": 4.0,
        "test/loss": 3.0,
    }
    record = jsonl.to_record(10, {**metrics, "train/lr": math.nan, "speed/data_ms": 1.0})
    assert jsonl.to_metrics(record) == metrics


@pytest.mark.parametrize("torn", ['{"step": 2, "val_loss": 1.', '{"step": 2, "a": 12', "\0\0\0\0"])
def test_a_line_truncated_by_a_kill(path, torn):
    JSONLLogger(path).start(0, world_size=1)
    JSONLLogger(path).log(1, {"val/loss": 3.0})
    with open(path, "a") as file:
        file.write(torn)
    assert read_history(path).series("val_loss") == [(1, 3.0)]
    JSONLLogger(path).start(1, world_size=1)
    JSONLLogger(path).log(2, {"val/loss": 2.0})
    records = read_history(path)
    assert records.series("val_loss") == [(1, 3.0), (2, 2.0)]
    assert records.faults == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "val_loss": 1.',
        "{}",
        "[1]",
        '{"step": 1.5, "val_loss": 1}',
        '{"step": true}',
        '{"step": 2, "val_loss": true}',
        '{"step": 2, "val_loss": 1e999}',
        '{"step": 2, "val_loss": 1e301}',
        '{"step": 2, "val_loss": {}}',
        "[" * 100_000,
        '{"step": 1' + "0" * 5000 + "}",
        "\udcff",
    ],
)
def test_an_invalid_line_is_refused_by_its_number(path, line):
    lines = ['{"start": 1, "step": 0}', line, '{"step": 2, "val_loss": 1}', ""]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"line 2 of .*metrics.jsonl is not a record") as error:
        read_history(path)
    assert len(str(error.value)) < 400


def test_a_full_disk_loses_lines_but_not_the_run(path, log_lines):
    """Like a full disk, a limit on the file size truncates the line that is being written."""
    history = JSONLLogger(path)
    history.start(0, world_size=1)
    content = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 10, limits[1]))
    try:
        train(history, range(1, 5), 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = log_lines
    assert line.startswith(f"WARNING cannot write {path}, training continues")
    assert path.read_bytes() == content
    history.log(8, {"val/loss": 1.0})
    assert read_history(path).series("val_loss") == [(8, 1.0)]


def random_file(draw: random.Random) -> list[str]:
    """Return the lines of a run that was killed, rolled back, continued and completed."""
    lines, step, reached = [], 0, 0
    for _ in range(draw.randrange(1, 6)):
        if draw.random() < 0.3 and lines:
            lines.append('{"step": 3, "train_lo' if draw.random() < 0.5 else "")
        lines.append(f'{{"start": {len(lines)}.5, "step": {step}, "world_size": 1}}')
        for _ in range(draw.randrange(12)):
            step += 1
            lines.append(f'{{"step": {step}, "train_loss": {draw.random()}}}')
            if draw.random() < 0.3:
                lines.append(f'{{"step": {step}, "val_loss": {draw.random()}, "val_a": null}}')
            reached = max(reached, step)
            if draw.random() < 0.1:
                step = draw.randrange(step)
                lines.append(f'{{"rollback": 1.5, "step": {step}}}')
        if draw.random() < 0.4:
            lines.append(f'{{"complete": 2.5, "step": {step}}}')
        step = draw.randrange(step + 1)
    return lines


def expected_rows(lines: list[str]) -> tuple[list[dict[str, float | None]], int, int]:
    """Return the rows that are not superseded, and the numbers of faults and of rollbacks."""
    rows: list[dict[str, float | None]] = []
    faults = rollbacks = 0
    is_running = False
    for line in lines:
        record = json.loads(line) if line.endswith("}") else {"torn": 0}
        if {"start", "rollback"} & record.keys():
            rows = [row for row in rows if row["step"] <= record["step"]]
            faults += "start" in record and is_running
            rollbacks += "rollback" in record
            is_running = True
        elif "complete" in record:
            is_running = False
        elif "torn" not in record:
            rows.append(record)
    return rows, faults, rollbacks


def test_rows_and_ends_of_random_runs(path):
    """The file may end after any line, or in the middle of a line."""
    draw = random.Random(1)
    for _ in range(300):
        lines = random_file(draw)
        lines = lines[: draw.randrange(len(lines) + 1)]
        while lines and not lines[-1].endswith("}"):
            lines.pop()
        torn = draw.choice(["", '{"step": 9', "\0\0"])
        path.write_text("".join(f"{line}\n" for line in lines) + torn)
        history, end = read_history(path), read_end(path)
        rows, faults, rollbacks = expected_rows(lines)
        assert (history.rows, history.faults, history.rollbacks) == (rows, faults, rollbacks)
        assert end.step == history.last_step == max((row["step"] for row in rows), default=None)
        assert end.is_complete == history.is_complete
        merged: dict[int, dict[str, float | None]] = {}
        for row in rows:
            merged.setdefault(row["step"], {}).update(row)
        assert history.by_step() == merged
        assert end.metrics == jsonl.to_metrics(merged.get(end.step, {}))


def test_the_end_of_a_history(path):
    assert read_end(path) is None
    path.touch()
    assert read_end(path) == HistoryEnd()
    path.write_bytes(b'{"start": 1.0, "step": 0}\n{"step": 7, "train_loss": 2.0}\n')
    with open(path, "ab") as file:
        file.write(b'{"start": 3.0, "step": 4}\n{"step": 9')
    assert read_end(path) == HistoryEnd(None, {}, False, reached=7, first_start=1.0)
    with open(path, "ab") as file:
        file.write(b', "val_loss": 1.5}\n')
    assert read_end(path) == HistoryEnd(9, {"val/loss": 1.5}, False, reached=9, first_start=1.0)
    with open(path, "ab") as file:
        file.write(b'damaged\n{"step": 10, "val_loss": 1.25}\n')
    assert read_end(path) is None


def test_without_the_start_line_of_a_restart_steps_appear_twice(path):
    """A full disk can lose any line, so also the line of a start."""
    train(JSONLLogger(path), range(1, 11), 1.0)
    train(JSONLLogger(path), range(5, 8), 2.0)
    steps = [step for step, _ in read_history(path).series("train_loss")]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7]
