"""`python -m mingpt_ddp.collectives` on three ranks under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, call, torchrun
from pause_points import SITE

from mingpt_ddp.distributed.collective_checks import OPERATIONS

SMALL = ["max_bytes=512", "repetitions=2"]
# all_to_all is as in a backend that lacks it; all_reduce adds one to a value of rank 1.
PATCHES = """
def patch(collectives):
    from dataclasses import replace
    def lacking(message):
        raise RuntimeError("Backend gloo does not support alltoall_base")
    def wrong(message):
        operation.call(message)
        if message.rank == 1 and message.input.nbytes == 60:
            message.output[0, 2] += 1
    operation = collectives.OPERATIONS["all_reduce"]
    collectives.OPERATIONS["all_reduce"] = replace(operation, call=wrong)
    collectives.OPERATIONS["all_to_all"] = replace(operation, call=lacking)
PATCHES["mingpt_ddp.distributed.collective_checks"] = patch
"""


def collectives(cwd: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [*torchrun(3)[:-1], "-m", "mingpt_ddp.collectives", *arguments]
    return call(command, cwd, PYTHONPATH=f"{path}:{ROOT}")


def test_every_operation_is_checked_and_reported(tmp_path):
    pytest.importorskip("plotly")
    done = collectives(tmp_path, *SMALL, "plot=page.html", "json=out/numbers.json")
    assert done.returncode == 0, done.stdout
    about, header, *rows, last = done.stdout.splitlines()
    assert about == "ranks 3, hosts 1, backend gloo, device cpu"
    assert header.split() == [
        "operation",
        "bytes",
        "latency",
        "(us)",
        "algbw",
        "(GB/s)",
        "busbw",
        "(GB/s)",
    ]
    assert last == "every result is correct"
    sizes = [
        (name, size)
        for name in OPERATIONS
        for size in ((0,) if name == "barrier" else (12, 60, 504))
    ]
    assert [(name, int(size)) for name, size, *_ in map(str.split, rows)] == sizes
    assert all(re.fullmatch(r"\w+ +\d+ +\d+\.\d +\d+\.\d{3} +\d+\.\d{3}", row) for row in rows)
    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert (numbers["ranks"], numbers["backend"]) == (3, "gloo")
    assert [(row["operation"], row["bytes"]) for row in numbers["results"]] == sizes
    [row] = [
        row for row in numbers["results"] if (row["operation"], row["bytes"]) == ("all_reduce", 504)
    ]
    assert row["algbw"] == pytest.approx(504 / row["latency_s"])
    assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)
    page = (tmp_path / "page.html").read_text()
    assert all(f'"name":"{name}"' in page for name in OPERATIONS if name != "barrier")
    assert not re.search(r"<(script|link)[^>]*(src|href)=", page), "the page is not self-contained"


def test_a_wrong_value_and_a_missing_operation(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "patches.py").write_text(PATCHES)
    done = collectives(tmp_path, "all_to_all", "all_reduce", *SMALL, path=str(tmp_path))
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    assert [line.split(None, 2)[2] for line in lines if line.startswith("all_to_all")] == [
        "not supported by gloo"
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == [
        "error: all_reduce of 60 bytes is wrong on rank 1: position 2 is 10 and not 9"
    ]
    assert "every result" not in done.stdout


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("all_redcue", "config error: all_redcue is not an operation; did you mean all_reduce?"),
        ("factr=2", "config error: factr is not a key; did you mean factor?"),
    ],
)
def test_an_error_of_all_ranks_is_one_line(argument, error, tmp_path):
    done = collectives(tmp_path, argument)
    assert done.returncode != 0
    assert done.stdout.splitlines().count(error) == 1, done.stdout


def test_local_processes_and_sizes_that_are_rounded_to_the_same(tmp_path):
    """One command starts the processes. An operation that is named twice is measured once."""
    command = [
        sys.executable,
        "-m",
        "mingpt_ddp.collectives",
        "barrier",
        "barrier",
        "broadcast",
        "nproc_per_node=2",
    ]
    done = call(
        [*command, "min_bytes=1", "max_bytes=20", "factor=2"], tmp_path, PYTHONPATH=str(ROOT)
    )
    assert done.returncode == 0, done.stdout
    about, _, *rows, last = done.stdout.splitlines()
    assert about == "ranks 2, hosts 1, backend gloo, device cpu"
    assert [tuple(row.split()[:2]) for row in rows] == [
        ("barrier", "0"),
        ("broadcast", "8"),
        ("broadcast", "16"),
    ]
    assert last == "every result is correct"


def test_messages_larger_than_the_memory_are_refused(tmp_path):
    done = collectives(tmp_path, f"max_bytes={1 << 50}")
    assert done.returncode != 0
    lines = [line for line in done.stdout.splitlines() if "error: " in line]
    assert [
        line
        for line in lines
        if line.startswith("config error: max_bytes=1125899906842624 does not fit")
    ]
    assert "Traceback" not in done.stdout.partition("torch/distributed")[0]
