"""The ledger of snapshots: invalid lines are skipped, and hostile ones use bounded memory."""

from __future__ import annotations

import json

import pytest

from mingpt_ddp.snapshots.write import ledger as module
from mingpt_ddp.snapshots.write.ledger import LEDGER, Ledger

HASHES = {"model": "a" * 64, "optimizer": "b" * 64}


def test_the_newest_line_of_a_step(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.read() == {}
    ledger.append(4, HASHES, "c" * 64)
    ledger.append(4, {**HASHES, "ema": "e" * 64}, "d" * 64)
    [(step, record)] = ledger.read().items()
    assert (step, record.step, record.settings_digest) == (4, 4, "d" * 64)
    assert record.hashes == {**HASHES, "ema": "e" * 64}


@pytest.mark.parametrize("step", [10**30, 10**18, -1, 4.0, True, "4", None])
def test_lines_without_a_valid_step_are_skipped(tmp_path, step):
    ledger = Ledger(tmp_path)
    with open(tmp_path / LEDGER, "w") as file:
        file.write(json.dumps({"step": step, "settings": "c" * 64, **HASHES}) + "\n")
    ledger.append(8, HASHES, "c" * 64)
    assert [*ledger.read()] == [8]


def test_one_endless_line_is_refused(tmp_path, log_lines):
    ledger = Ledger(tmp_path)
    ledger.append(4, HASHES, "c" * 64)
    with open(tmp_path / LEDGER, "ab") as file:
        file.write(b"[" + b"0," * 5_000_000)
    assert [*ledger.read()] == [4]
    [line] = log_lines
    assert line.startswith("WARNING some hashes of snapshots cannot be read")
    assert "more than 4,194,304 bytes" in line


def test_a_full_ledger_can_be_read(tmp_path, log_lines, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    ledger = Ledger(tmp_path)
    for step in range(1, 9):
        ledger.append(step, HASHES, "c" * 64)
    assert [*ledger.read()] == [1, 2, 3]
    [line] = log_lines
    assert "it is full: at most 1,000 bytes" in line
