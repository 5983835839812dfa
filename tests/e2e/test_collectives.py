"""Check examples/collectives.py on three ranks under torchrun."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from example_files import EXAMPLES, command_of, run_in_shell
from launching import call

EXAMPLE = EXAMPLES / "collectives.py"
OPERATIONS = runpy.run_path(str(EXAMPLE))["OPERATIONS"]
SMALL = ["max_bytes=512", "repetitions=2"]
# This script breaks some operations of torch, and then runs the example.
BROKEN = """
import runpy, sys
import torch.distributed as dist

def all_reduce(tensor):
    correct(tensor)
    if dist.get_rank() > 0 and tensor.nbytes == 60:
        tensor[0, 2] += 1

def all_to_all_single(output, input):
    raise RuntimeError("Backend gloo does not support alltoall_base")

correct, dist.all_reduce = dist.all_reduce, all_reduce
dist.all_to_all_single = all_to_all_single
dist.barrier = dist.barrier if "barrier" not in sys.argv else lambda: None
runpy.run_path({example!r}, run_name="__main__")
"""


def collectives(cwd: Path, *words: str, script: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    return call([*start, str(script), *words], cwd)


@pytest.fixture
def broken(tmp_path) -> Path:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(example=str(EXAMPLE)))
    return path


def test_the_command_of_the_example(tmp_path):
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("every result is correct\n")


def test_the_example_needs_only_torch():
    assert "mingpt_ddp" not in EXAMPLE.read_text()


def test_every_operation_is_checked_and_reported(tmp_path):
    done = collectives(tmp_path, *SMALL, "json=numbers.json")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    first = lines.index("ranks 3, hosts 1, backend gloo, device cpu")
    header, *rows, last = lines[first + 1 :]
    assert header.split("  ")[0] == "operation"
    assert header.endswith("bytes latency (us) algbw (GB/s) busbw (GB/s)")
    assert last == "every result is correct"
    sizes = [
        (name, size)
        for name in OPERATIONS
        for size in ((0,) if name == "barrier" else (12, 60, 504))
    ]
    assert [(name, int(size)) for name, size, *_ in map(str.split, rows)] == sizes
    assert all(re.fullmatch(r"\w+ +\d+ +\d+\.\d +\d+\.\d{3} +\d+\.\d{3}", row) for row in rows)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert (numbers["ranks"], numbers["backend"]) == (3, "gloo")
    assert [(row["operation"], row["bytes"]) for row in numbers["results"]] == sizes
    # The factors are those of nccl-tests.
    factors = {"all_reduce": 4 / 3, "ring": 4 / 3} | dict.fromkeys(
        ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"), 2 / 3
    )
    for row in numbers["results"]:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["latency_s"])
        assert row["busbw"] == pytest.approx(row["algbw"] * factors.get(row["operation"], 1))


def test_a_wrong_value_and_a_missing_operation(broken, tmp_path):
    """The lowest rank with a wrong value reports it."""
    done = collectives(tmp_path, "all_to_all", "all_reduce", *SMALL, script=broken)
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    assert [line.split(None, 2)[2] for line in lines if line.startswith("all_to_all")] == [
        "not supported by gloo"
    ]
    assert [line for line in lines if line.startswith("error: ")] == [
        "error: all_reduce of 60 bytes is wrong on rank 1: position 2 is 10 and not 9"
    ]
    assert "every result" not in done.stdout


def test_a_barrier_that_does_not_wait(broken, tmp_path):
    done = collectives(tmp_path, "barrier", *SMALL, script=broken)
    assert done.returncode == 1, done.stdout
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    wrong = "barrier of 0 bytes is wrong on rank [012]: it ended after [12] of 3 ranks arrived"
    assert re.fullmatch(f"error: {wrong}", error)


def test_repeated_operations_and_equal_rounded_sizes_are_measured_once(tmp_path):
    sizes = ["min_bytes=1", "max_bytes=30", "factor=2"]
    done = collectives(tmp_path, "barrier", "barrier", "broadcast", *sizes)
    assert done.returncode == 0, done.stdout
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line[:1] == "b"]
    assert rows == [["barrier", "0"], ["broadcast", "12"]]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("backend=ncll", "use backend=gloo, nccl or mpi"),
        ("device=gpu", "use device=cpu or cuda"),
        ("max_bytes=4", "use 1 <= min_bytes <= max_bytes"),
        ("factor=1", "factor must be at least 2"),
        ("repetitions=0", "repetitions must be at least 1"),
        ("factor=x", "factor=x must be a number"),
        ("all_reduc", f"all_reduc is not an operation; use {', '.join(OPERATIONS)}"),
        ("min_byte=8", "min_byte is not a key; use backend, device, min_bytes, max_bytes, "),
        ("max_bytes=8", "this needs several ranks; start it with torchrun --nproc_per_node=3"),
    ],
)
def test_errors(word, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), word])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {error}")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["factr=2"], "error: factr is not a key; use "),
        (["min_bytes=1125899906842624", "max_bytes=1125899906842624"], "error: .*allocate"),
    ],
)
def test_an_error_of_all_ranks_has_no_traceback(words, error, tmp_path):
    done = collectives(tmp_path, *words)
    assert done.returncode == 1
    assert re.search(f"^{error}", done.stdout, re.MULTILINE), done.stdout
    assert f'File "{EXAMPLE}"' not in done.stdout
