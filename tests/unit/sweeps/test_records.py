"""The records of trials survive kills and full disks, and refuse damage in one line."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from mingpt_ddp.errors import RunError
from mingpt_ddp.results.front import read_goals
from mingpt_ddp.sweeps.search import records as records_module
from mingpt_ddp.sweeps.search.records import Drawn, Finished, Header, Records, Reopened, Reported

HEADER = Header(sampler="tpe", space={}, objectives=["val_loss"], seed=1, fixed={})
LINES = [
    Drawn(trial=0, params={"a": 1, "b": 0.1, "c": "x", "d": None, "e": True}, time=1.5),
    Reported(trial=0, step=10, value=2.5, pruned=None),
    Reported(trial=0, step=20, value="nan", pruned="why"),
    Finished(trial=0, outcome="pruned", values=[], reason="why", job="a", time=2.0),
    Reopened(trial=0),
    Finished(trial=0, outcome="failed", values=[], reason="", job="a", time=3.0),
]


def write(path, lines=LINES) -> Records:
    records = Records(path)
    records.begin(HEADER)
    for line in lines:
        records.append(line)
    return records


def test_what_was_written_is_read(tmp_path):
    written = write(tmp_path / "trials.jsonl")
    read = Records(tmp_path / "trials.jsonl")
    assert read.trials == written.trials and read.reports == written.reports == [(0, 10)]
    assert read.header == HEADER
    trial = read.trials[0]
    assert trial.params == {"a": 1, "b": 0.1, "c": "x", "d": None, "e": True}
    assert [type(value) for value in trial.params.values()] == [int, float, str, type(None), bool]
    assert (trial.outcome, trial.failures, trial.job) == ("failed", 1, "a")


def test_a_torn_line_is_cut_at_the_next_start(tmp_path):
    path = tmp_path / "trials.jsonl"
    write(path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        records = Records(path)
        assert path.stat().st_size == size, "nothing is written before begin()"
        records.begin(HEADER)
        again = path.read_bytes()
        assert again == data[: max(data[:size].rfind(b"\n"), data.index(b"\n")) + 1]


@pytest.mark.parametrize("number", range(len(LINES) + 1))
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"null",
        b"[" * 100_000,
        b'{"kind":"other"}',
        b'{"kind":"drawn","trial":7,"params":{},"time":1.0}',
        b'{"kind":"report","trial":0,"step":-1,"value":1.0,"pruned":null}',
        b'{"kind":"report","trial":0,"step":5,"value":NaN,"pruned":null}',
        b'{"kind":"finished","trial":0,"outcome":"complete","values":[],"reason":"","job":"","time":1}',
        b"\xff\xfe",
    ],
    ids=range(10),
)
def test_damage_is_one_line(tmp_path, number, damage):
    path = tmp_path / "trials.jsonl"
    write(path)
    lines = path.read_bytes().splitlines()
    lines[number] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(RunError, match=rf"trials.jsonl: line {number + 1} is damaged") as caught:
        Records(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("job", ["../a", "/etc", "a/b", "..", ".", "a\0"])
def test_a_job_is_a_directory_of_the_sweep(tmp_path, job):
    """Otherwise the result of another directory would count as that of a trial."""
    path = tmp_path / "trials.jsonl"
    write(path)
    lines = path.read_bytes().splitlines()
    lines[4] = lines[4].replace(b'"job":"a"', b'"job":' + json.dumps(job).encode())
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(RunError, match="line 5 is damaged"):
        Records(path)


def test_only_a_regular_file_is_read(tmp_path):
    path = tmp_path / "trials.jsonl"
    os.mkfifo(path)
    with pytest.raises(RunError, match="not a regular file"):
        Records(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(RunError, match="cannot be read"):
        Records(path)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "trials.jsonl"
    records = write(path, LINES[:1])
    pwrite = os.pwrite

    def fill(file, data, offset):
        if offset == size:
            return pwrite(file, data[:5], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    size = path.stat().st_size
    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(RunError, match="No space left on device"):
        records.append(LINES[1])
    assert path.stat().st_size == size + 5
    monkeypatch.undo()
    records.append(LINES[1])
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == [
        *("header", "drawn", "report")
    ]
    assert Records(path).reports == [(0, 10)]


def test_a_line_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "trials.jsonl"
    write(path)
    content = path.read_bytes()
    monkeypatch.setattr(records_module, "MAX_LINE_BYTES", 1000)
    records = Records(path)
    records.begin(HEADER)
    with pytest.raises(
        RunError, match=r"cannot write .*trials.jsonl: it has 1,\d+ bytes, of which"
    ):
        records.append(Drawn(trial=1, params={"a": 1000 * "x"}, time=1.5))
    assert path.read_bytes() == content
    Records(path)
    monkeypatch.setattr(records_module, "MAX_BYTES", len(content) + 10)
    with pytest.raises(RunError, match="it is full: no more than"):
        records.append(Drawn(trial=1, params={}, time=1.5))


def test_the_objectives_of_a_large_search_are_read(tmp_path):
    header = replace(
        HEADER, objectives=["val_loss", "parameters"], fixed={"a": [str(i) for i in range(20_000)]}
    )
    records = Records(tmp_path / "trials.jsonl")
    records.begin(header)
    assert [goal.name for goal in read_goals([tmp_path])] == ["val_loss", "parameters"]
