"""No warning of Hydra or OmegaConf reaches a user, whichever versions are installed."""

from __future__ import annotations

import re
import sys

import pytest
from launching import ROOT, WITH_TOY, call

TOY = [WITH_TOY, "experiment=toy", "trainer.max_steps=1"]
MAIN = str(ROOT / "main.py")
SEARCH = [
    WITH_TOY,
    "--config-dir=mine",
    "experiment=mine",
    "ddp.nproc_per_node=2",
    "trainer.max_steps=1",
    "-m",
    "sweep=optuna",
    "sweep.trials=1",
    "optimizer.lr=range(1e-3,4e-3,1e-3)",
]
MINE = """# @package _global_
defaults: [toy]
hydra: {callbacks: {print: {_target_: printing.Print}}}
"""
PRINTING = """
from hydra.experimental.callback import Callback

class Print(Callback):
    def on_job_end(self, **kwargs):
        print("a callback")
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([MAIN, *TOY, "-m", "run.seed=1,2"], id="sweep"),
        pytest.param([MAIN, *SEARCH], id="search by local ranks, with a callback"),
        pytest.param(["-m", "mingpt_ddp", "plan", *TOY], id="plan"),
    ],
)
def test_hydra_warns_of_nothing(command, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(MINE)
    (tmp_path / "printing.py").write_text(PRINTING)
    # The option -W keeps the test from forking the command off a process that has other warning
    # filters. Local ranks read the environment variable.
    settings = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONWARNINGS": "always"}
    done = call([sys.executable, "-W", "always", *command], tmp_path, **settings)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("a callback") == (1 if command == [MAIN, *SEARCH] else 0)
    theirs = r".*(?:Hydra\w*Warning|/(?:hydra|omegaconf|hydra_plugins)/.*Warning).*"
    assert re.findall(theirs, done.stdout) == []


def test_sweep_keys_on_a_single_run_give_a_warning(tmp_path):
    """The workers of a sweep's jobs get these keys too, but do not warn."""
    warning = "sweep.retries has no effect on a single run; add -m for a sweep"
    assert warning in call([sys.executable, MAIN, *TOY, "sweep.retries=1"], tmp_path).stdout
    words = ["-m", "sweep.retries=1", "sweep.parallel=2", "run.name=sweep", "run.seed=1,2"]
    done = call([sys.executable, MAIN, *TOY, *words], tmp_path)
    assert "sweep: 2 jobs, 0 already complete, 0 failed" in done.stdout
    logs = [path.read_text() for path in tmp_path.glob("outputs/sweep/*/main.rank0.log")]
    assert len(logs) == 2
    assert not any("without -m" in text for text in [done.stdout, *logs])
