"""Importing torch takes seconds, so only commands that compute something import it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from launching import ROOT

from mingpt_ddp.cli import COMMANDS

FORMAT_2 = ROOT / "tests" / "data" / "format2" / "gpt-adamw" / "run"
HEAVY = ["torch", "numpy", "plotly", "scipy", "optuna", "tensorboard", "aiohttp", "transformers"]
HEAVY += ["torch._dynamo"]
SCRIPT = """
import os, runpy, sys
def report(code):
    print(*set(HEAVY) & {*sys.modules}, file=sys.stderr, flush=True)
    exit(code)
exit = os._exit
os._exit = report
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    report(0)
except SystemExit as error:
    report(error.code or 0)
"""


def heavy_imports(*args: str) -> tuple[int, list[str]]:
    """Run `python -m ...`. Return its exit code and the HEAVY modules that it has imported."""
    command = [sys.executable, "-c", f"HEAVY = {HEAVY}{SCRIPT}", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize(
    "words", [*([name, "--help"] for name in COMMANDS), ["--help"], ["--version"]], ids=" ".join
)
def test_a_command_that_describes_itself_imports_no_heavy_library(words):
    assert heavy_imports("mingpt_ddp", *words) == (0, [])


@pytest.mark.parametrize(
    "words",
    ["snapshots list", "snapshots verify", "snapshots prune keep_last=1", "report format=json"],
)
def test_snapshots_and_tables_need_no_torch(words, tmp_path):
    shutil.copytree(FORMAT_2, tmp_path / "run")
    name, *words = words.split()
    assert heavy_imports("mingpt_ddp", name, *words, str(tmp_path / "run")) == (0, [])


@pytest.mark.parametrize(
    "words", ["model.n_head=5", "data.path=nosuch.txt", "model.n_head=5 ddp.nproc_per_node=2"]
)
def test_an_error_of_the_configuration_comes_before_torch(words):
    assert heavy_imports("mingpt_ddp", *words.split()) == (2, [])


TINY_RUN = [
    "model=gpt_nano",
    "data.truncate=0.01",
    "trainer.max_steps=1",
    "trainer.batch_size=2",
    "snapshot.every_steps=null",
    "trainer.device=cpu",
]


def test_a_launcher_leaves_torch_to_its_workers(tmp_path):
    words = [*TINY_RUN, "ddp.nproc_per_node=2", f"run.root={tmp_path}"]
    assert heavy_imports("mingpt_ddp", *words) == (0, [])


def test_a_run_imports_nothing_that_a_report_or_a_search_needs(tmp_path):
    code, imported = heavy_imports("mingpt_ddp", *TINY_RUN, f"run.root={tmp_path}")
    assert code == 0
    assert "torch" in imported and not {"scipy", "plotly", "optuna"} & {*imported}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_run_that_compiles_nothing_imports_no_compiler(optimizer, tmp_path):
    """A resumed run and a sample import no compiler either."""
    words = [*TINY_RUN, f"optimizer={optimizer}", f"run.root={tmp_path}", "run.name=run"]
    code, first = heavy_imports("mingpt_ddp", *words)
    assert code == 0
    code, resumed = heavy_imports("mingpt_ddp", *words, "trainer.max_steps=2")
    assert code == 0
    code, sample = heavy_imports("mingpt_ddp", "sample", f"{tmp_path}/run", "max_new_tokens=2")
    assert code == 0
    for imported in (first, resumed, sample):
        assert "torch" in imported and "torch._dynamo" not in imported
