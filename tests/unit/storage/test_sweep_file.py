"""The files that a sweep keeps between its starts: cores, threads, and failures of jobs."""

from __future__ import annotations

import json

import pytest

from mingpt_ddp.errors import RunError
from mingpt_ddp.storage import sweep_file
from mingpt_ddp.storage.run_directory import FAILURES, SWEEP
from mingpt_ddp.storage.sweep_file import JobFailure, SweepFile, read_failures


def test_threads_that_torch_cannot_start_are_not_kept(tmp_path):
    threads = 10**6
    (tmp_path / "sweep.json").write_text(json.dumps({"threads": {"1": threads}, "cores": threads}))
    file = SweepFile(tmp_path)
    assert file.cores is None
    assert file.threads(1, 2) == 2
    assert SweepFile(tmp_path).threads(1, 3) == 2


def test_no_more_failures_are_written_than_can_be_read_again(tmp_path):
    lines = [b" " * 999_999 + b"\n"] * (sweep_file.MAX_BYTES // 10**6)
    (tmp_path / FAILURES).write_bytes(b"".join(lines))
    file = SweepFile(tmp_path)
    with pytest.raises(RunError, match=r"cannot write .*failures\.jsonl: it is full"):
        for number in range(1000):
            file.fail(f"a={number}", f"a-{number}", "it failed" * 10_000)
    assert 5 < len(read_failures(tmp_path)) < 20


def test_failures_are_kept_until_the_job_succeeds(tmp_path):
    file = SweepFile(tmp_path)
    file.fail("lr=1", "lr=1-abcd", "first")
    file.fail("lr=1", "lr=1-abcd", "second")
    file.fail("lr=2", "", "third")
    path = tmp_path / FAILURES
    # A killed process left a part of a line.
    path.write_bytes(path.read_bytes() + b'{"job": "lr=1", "reas')
    expected = [JobFailure("lr=1", "lr=1-abcd", 2, "second"), JobFailure("lr=2", "", 1, "third")]
    assert read_failures(tmp_path) == expected
    for name in ("lr=1-abcd", ""):
        assert SweepFile(tmp_path).failure_of("lr=1", name) == expected[0]
        assert file.failure_of("lr=1", name) == expected[0]
    file.succeed("lr=1", "lr=1-abcd")
    assert read_failures(tmp_path) == expected[1:] and file.failure_of("lr=1", "") is None
    file.succeed("lr=2", "lr=2-cdef")
    assert read_failures(tmp_path) == []


def test_failures_are_found_by_directory_however_the_job_is_spelled(tmp_path):
    file = SweepFile(tmp_path)
    file.fail("lr=1e-3", "lr=1e-3-abcd", "why")
    file.fail("lr=1e-3", "lr=1e-3-ef01", "of another size")
    file.fail("lr=0.001, seed=1", "lr=0.001,seed=1-abcd", "why")
    assert file.failure_of("lr=1.0e-3", "lr=1.0e-3-abcd").count == 2
    assert file.failure_of("lr=1e-3", "lr=1e-3-2345") is None
    assert [failure.count for failure in read_failures(tmp_path)] == [1, 2]
    file.succeed("lr=1e-3", "lr=1e-3-abcd")
    assert [failure.reason for failure in read_failures(tmp_path)] == ["of another size"]
    file.succeed("lr=1e-3", "lr=1e-3-ef01")
    assert read_failures(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]",
        '{"cores": "2", "threads": [1]}',
        '{"job": 1}\n{"reason": 2}\n[3]\n\xff',
    ],
)
def test_a_damaged_file_counts_as_missing(content, tmp_path):
    for name in (SWEEP, FAILURES):
        (tmp_path / name).write_text(content)
    file = SweepFile(tmp_path)
    assert (file.cores, read_failures(tmp_path)) == (None, [])
    assert file.threads(1, 2) == 2


def test_an_unnamed_sweep_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = SweepFile(None)
    file.keep_cores(2)
    file.fail("lr=1", "", "why")
    assert file.cores == 2 and file.failure_of("lr=1", "lr=1-abcd")
    assert not [*tmp_path.iterdir()]
