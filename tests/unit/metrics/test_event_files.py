"""Reading TensorBoard's event files without TensorBoard's reader."""

from __future__ import annotations

import struct

import pytest

from mingpt_ddp.metrics.sinks import event_files
from mingpt_ddp.metrics.sinks.event_files import read_events
from mingpt_ddp.metrics.trackers.tensorboard import TensorBoardLogger


def log_steps(directory, steps: range, offset: float = 0.0) -> None:
    logger = TensorBoardLogger(directory)
    logger.start(steps.start - 1, 1)
    for step in steps:
        logger.log(step, {"speed/step_ms": step + offset})
    logger.log_text(steps[-1], "sample", f"a text\nof step {steps[-1]}")
    logger.close()


def test_a_step_repeated_after_a_restart_counts_once(tmp_path, monkeypatch):
    log_steps(tmp_path, range(1, 6))
    first = next(tmp_path.glob("*tfevents*"))
    # before the next, in the same second
    first.rename(first.with_name(first.name.replace("tfevents.", "tfevents.0")))
    log_steps(tmp_path, range(4, 6), offset=0.5)
    events = read_events(tmp_path)
    assert events.scalars == {"speed/step_ms": {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.5, 5: 5.5}}
    assert events.texts == {"sample": {5: "    a text\n    of step 5"}}


def test_a_partial_record_at_the_end_is_ignored(tmp_path):
    log_steps(tmp_path, range(1, 6))
    [path] = tmp_path.glob("*tfevents*")
    content = path.read_bytes()
    for size in (len(content) - 1, len(content) - 200):
        path.write_bytes(content[:size])
        assert set(read_events(tmp_path).scalars["speed/step_ms"]) <= {1, 2, 3, 4, 5}
    path.write_bytes(content[:11])
    assert read_events(tmp_path).scalars == {}


@pytest.mark.parametrize("record", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f"])
def test_a_damaged_file_is_an_error(record, tmp_path):
    (tmp_path / "events.out.tfevents.1").write_bytes(
        struct.pack("<QI", len(record), 0) + record + b"\0" * 4
    )
    with pytest.raises(ValueError, match="is damaged"):
        read_events(tmp_path)


def test_a_record_of_any_length_takes_no_memory(tmp_path):
    (tmp_path / "events.out.tfevents.1").write_bytes(struct.pack("<QI", 1 << 62, 0) + b"\0" * 100)
    assert read_events(tmp_path).scalars == {}


def test_too_many_events_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(event_files, "MAX_EVENTS", 3)
    log_steps(tmp_path, range(1, 6))
    with pytest.raises(ValueError, match="more than 3 events"):
        read_events(tmp_path)
