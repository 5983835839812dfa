"""A profiled run has a trace for each rank, a table in rank zero's log, and unchanged results."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import TINY

from mingpt_ddp.process import logs
from mingpt_ddp.process.env import read_env
from multiprocess.ranks import configure, run_ranks, train_in_turn

STEPS = [
    "trainer.max_steps=6",
    "trainer.eval_every=null",
    "snapshot.every_steps=null",
    "trainer.sample_every=null",
]
# Overrides by name. `later` resumes the run of `ddp` after the profiled steps.
RUNS = {
    "plain": [],
    "ddp": ["trainer.profile=[3,4]"],
    "gloo": ["trainer.profile=[5,9]", "ddp.backend=gloo"],
    "fsdp": ["trainer.profile=[3,4]", "ddp.strategy=fsdp"],
    "later": ["trainer.profile=[3,4]", "trainer.max_steps=8", "run.name=ddp"],
}


def train(configs: list[dict[str, Any]]) -> None:
    logs.to_console(read_env())
    train_in_turn(configs)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("profile")
    common = [*TINY, *STEPS, f"run.root={root}", f"data.cache_dir={root / 'cache'}"]
    configs = [configure(*common, f"run.name={name}", *words) for name, words in RUNS.items()]
    run_ranks(2, train, root / "ranks", configs=configs)
    return root


def steps_in(path: Path) -> set[str]:
    """Return the names of the steps in a trace."""
    with gzip.open(path) as file:
        names = [str(event["name"]) for event in json.load(file)["traceEvents"]]
    assert "fetch the batch" in names and "aten::embedding" in names
    return {name for name in names if name.startswith("ProfilerStep#")}


@pytest.mark.parametrize(("name", "steps"), [("ddp", (3, 4)), ("gloo", (5, 6)), ("fsdp", (3, 4))])
def test_each_rank_has_a_trace_and_rank_zero_a_table(name, steps, root):
    for rank in (0, 1):
        assert steps_in(root / name / "profile" / f"rank{rank}.json.gz") == {
            f"ProfilerStep#{step}" for step in steps
        }
        text = (root / name / f"main.rank{rank}.log").read_text()
        assert ("the trace is" in text) == (rank == 0)
    text = (root / name / "main.rank0.log").read_text()
    summary = text.partition("profile:\n")[2].partition("the trace is ")[0]
    assert "Self CPU time total: " in summary
    assert re.search(r"^ *(aten::|c10d::|gloo:|FSDP|autograd::)", summary, re.MULTILINE)
    assert {path.name for path in (root / name / "profile").iterdir()} == {
        "rank0.json.gz",
        "rank1.json.gz",
    }


def test_torch_writes_nothing_to_the_console(root):
    outputs = [path.read_text() for path in (root / "ranks").glob("rank*.txt")]
    assert sum("the trace is" in text for text in outputs) == 1
    assert not any("USDT" in text or "profiler_" in text for text in outputs)


def test_snapshots_equal_those_of_a_run_without_a_profile(root):
    plain, profiled = (root / name / "snapshots" / "step_00000006" for name in ("plain", "ddp"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (plain / file).read_bytes() == (profiled / file).read_bytes()


def test_a_resumed_run_logs_that_the_profiled_steps_are_past(root):
    text = (root / "ddp" / "main.rank0.log").read_text()
    _, said, rest = text.partition(
        "trainer.profile=[3,4], but this start trains steps 7 to 8: nothing is profiled"
    )
    assert said
    assert "the trace is" not in rest
