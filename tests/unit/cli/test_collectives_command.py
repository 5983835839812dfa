"""The keys of `mingpt_ddp.collectives`, and what needs no second rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tools import call_tool

from mingpt_ddp.cli import collectives_command as command
from mingpt_ddp.distributed import collective_checks as collectives


@pytest.fixture
def run(monkeypatch, capsys):
    return call_tool(command, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (
            "backend=ncll",
            "backend='ncll' must be 'auto', 'gloo', 'nccl' or 'mpi'; did you mean nccl?",
        ),
        ("max_bytes=4", "min_bytes=8 must be at most max_bytes=4"),
        ("factor=1", "factor=1 must be greater than or equal to 2"),
        ("repetitions=0", "repetitions=0 must be greater than or equal to 1"),
        ("plot=s3://bucket/a.html", "plot=s3://bucket/a.html must be a local file"),
        ("json=", "json= must be a local file"),
        ("plot=busbw.svg", "plot=busbw.svg is a page; give it a name with .html"),
        ("all_reduc", "all_reduc is not an operation; did you mean all_reduce?"),
        ("min_byte=8", "min_byte is not a key; did you mean min_bytes?"),
    ],
)
def test_invalid_keys_are_refused(argument, error, run):
    assert run(argument) == (2, "", f"config error: {error}\n")


def test_a_single_process_says_how_to_start_it(run):
    code, out, err = run()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "start it with torchrun --nproc_per_node=3 -m mingpt_ddp.collectives" in err


def test_a_plot_needs_plotly(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert run("plot=a.html") == (
        2,
        "",
        "config error: plot needs plotly; pip install 'mingpt_ddp[report]'\n",
    )


def test_the_usage_lists_the_operations():
    listed = command.__doc__.partition("operations ")[2].partition("\nbackend ")[0]
    words = listed.replace(" (an all-reduce written by hand)", "").removesuffix(" (all)")
    assert (
        [word.strip() for word in words.split(",")]
        == [*collectives.OPERATIONS]
        == command.OPERATIONS
    )


def test_nothing_is_started_for_a_file_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "numbers.json"
    message = (
        f"run error: json={path} cannot be written, because of {tmp_path / 'file'}; "
        "name another file\n"
    )
    assert run("nproc_per_node=2", f"json={path}") == (2, "", message)


def test_one_local_process_is_not_several_ranks(run):
    code, out, err = run("nproc_per_node=1")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_bus_bandwidths_of_nccl_tests():
    factors = {name: operation.factor(4) for name, operation in collectives.OPERATIONS.items()}
    assert factors.pop("all_reduce") == factors.pop("ring") == 1.5
    shared = {name for name, factor in factors.items() if factor == 0.75}
    assert shared == {"gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"}
    assert {factor for name, factor in factors.items() if name not in shared} == {1}


def test_a_barrier_that_does_not_wait(monkeypatch):
    group = SimpleNamespace(rank=1, world_size=3, store=dist.HashStore())
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert collectives._check_barrier(group) == "it ended after 1 of 3 ranks arrived"
    monkeypatch.setattr(dist, "barrier", lambda: group.store.add("arrived", 1))
    assert collectives._check_barrier(group) is None
