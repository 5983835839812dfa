"""metrics.jsonl: what is written, what is read back after kills, and what is refused."""

from __future__ import annotations

import json
import math
import os
import resource

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics import jsonl
from mingpt_ddp.metrics.jsonl import METRICS, JSONLLogger, last_step, read_history

CONFIG = from_mapping(configure())


@pytest.fixture
def path(tmp_path):
    return tmp_path / METRICS


def train(history: JSONLLogger, steps: range, loss: float) -> None:
    for step in steps:
        history.log(step, {"train/loss": loss, "train/lr": 1e-3})
        if step % 4 == 0:
            history.log(step, {"val/loss": loss})


def test_one_json_object_a_line(path):
    history = JSONLLogger(path)
    history.start(0, world_size=2)
    metrics = {
        "train/grad_norm": 0.5,
        "train/loss": 2.5,
        "speed/tokens_per_s": 4000.0,
        "speed/step_ms": 8.0,
    }
    history.log(10, {**metrics, "train/lr": 1e-3})
    history.log(
        20, {**metrics, "train/lr": 1e-3, "speed/matmul_utilization": 0.25, "speed/mfu": 0.125}
    )
    history.log(20, {"val/loss": 2.75, "val/bits_per_char": 4.0})
    history.complete(20, CONFIG)
    start, trained, with_utilization, evaluated, complete = map(
        json.loads, path.read_text().splitlines()
    )
    assert start.pop("start") == pytest.approx(complete.pop("complete"), abs=60)
    assert start == {"step": 0, "world_size": 2}
    assert trained == {
        "step": 10,
        "train_loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_s": 4000.0,
        "step_ms": 8,
    }
    assert list(trained) == ["step", "train_loss", "lr", "grad_norm", "tokens_per_s", "step_ms"]
    assert with_utilization == {**trained, "step": 20, "mfu": 0.125, "matmul_utilization": 0.25}
    assert evaluated == {"step": 20, "val_loss": 2.75, "val_bits_per_char": 4.0}
    assert complete == {"step": 20}


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


def test_repeated_steps_count_once(path):
    """Killed after step 10, with the last snapshot at step 6.

    Then a rollback from step 9 to step 8.
    """
    for begin, end, loss in ((0, 10, 1.0), (6, 9, 2.0)):
        history = JSONLLogger(path)
        history.start(begin, world_size=1)
        train(history, range(begin + 1, end + 1), loss)
    history.rollback(8)
    train(history, range(9, 13), 3.0)
    records = read_history(path)
    ways = [
        *((step, 1.0) for step in range(1, 7)),
        (7, 2.0),
        (8, 2.0),
        *((step, 3.0) for step in range(9, 13)),
    ]
    assert records.series("train_loss") == ways
    assert records.series("val_loss") == [(4, 1.0), (8, 2.0), (12, 3.0)]
    assert (records.starts, records.faults, records.rollbacks) == (2, 1, 1)


def test_a_continued_run_has_no_faults(path):
    for limit in (4, 8):
        history = JSONLLogger(path)
        history.start(limit - 4, world_size=1)
        train(history, range(limit - 3, limit + 1), 1.0)
        history.complete(limit, CONFIG)
    records = read_history(path)
    assert (records.starts, records.faults) == (2, 0)
    assert [step for step, _ in records.series("train_loss")] == list(range(1, 9))


@pytest.mark.parametrize(
    "torn", ['{"step": 2, "val_loss": 1.', '{"step": 2', "\0\0\0\0", '{"step": 2, "a": 12']
)
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
        "",
        '{"step": 1.5, "val_loss": 1}',
        '{"step": true}',
        '{"step": 2, "val_loss": "1"}',
        '{"step": 2, "val_loss": true}',
        '{"step": 2, "val_loss": 1e999}',
        '{"step": 2, "val_loss": {}}',
        "[" * 100_000,
        '{"step": 1' + "0" * 5000 + "}",
        "\udcff",
    ],
)
def test_any_other_line_is_refused_by_its_number(path, line):
    lines = ['{"start": 1, "step": 0}', line, '{"step": 2, "val_loss": 1}', ""]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"line 2 of .*metrics.jsonl is not a record") as error:
        read_history(path)
    assert len(str(error.value)) < 400
    path.write_bytes("\n".join([lines[0], line, ""]).encode(errors="surrogateescape"))
    with pytest.raises(DataError):  # it is the last one, but whole
        read_history(path)


def test_nonfinite_values_are_omitted(path):
    history = JSONLLogger(path)
    history.log(1, {"train/loss": math.nan, "train/lr": 1e-3, "train/grad_norm": math.inf})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["train_loss"] is None
    with open(path, "a") as file:
        file.write('{"step": 2, "train_loss": NaN, "lr": 1e-3}\n')
    records = read_history(path)
    assert records.series("train_loss") == []
    assert records.series("lr") == [(1, 1e-3), (2, 1e-3)]


def test_other_keys_are_kept(path):
    path.write_text('{"step": 3, "mfu": 0.5}\n')
    assert read_history(path).series("mfu") == [(3, 0.5)]


def test_a_start_without_a_time_is_a_start(path):
    path.write_text('{"start": null, "step": 0}\n{"start": 5.0, "step": 0}\n')
    assert (read_history(path).starts, read_history(path).began) == (2, 5.0)


def test_an_empty_file_is_an_empty_history(path):
    path.touch()
    assert read_history(path).rows == []


def test_a_full_disk_loses_lines_but_not_the_run(path, log_lines):
    """A limit on the file size truncates the line being written, like a full disk."""
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


def test_the_number_of_lines_is_limited(path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINES", 3)
    path.write_text('{"step": 1}\n' * 2)
    assert len(read_history(path).rows) == 2
    path.write_text('{"step": 1}\n' * 3)
    with pytest.raises(DataError, match="more than 3 lines; shorten it"):
        read_history(path)


def test_the_last_step_is_read_from_the_end(path, monkeypatch):
    assert last_step(path) == 0
    path.write_bytes(b'{"step": 7, "train_loss": 2.0}\n{"start": 1.0, "step": 4}\n{"step": 9')
    assert last_step(path) == 7
    monkeypatch.setattr(jsonl, "END_BYTES", 40)
    assert last_step(path) == 0
    os.remove(path)
    os.mkfifo(path)
    assert last_step(path) == 0
