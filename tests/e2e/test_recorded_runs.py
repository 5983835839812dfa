"""Runs of an earlier version go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launching import call, python_main
from make_recorded_runs import DATA, RUNS, STEPS, command, train_losses


@pytest.fixture
def cwd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a recorded directory, with the texts."""
    shutil.copytree(DATA / request.getfixturevalue("name"), tmp_path, dirs_exist_ok=True)
    for text in DATA.glob("text.*"):
        shutil.copy(text, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_goes_on(name, cwd):
    expected = json.loads((cwd / "expected.json").read_text())
    begun = train_losses(cwd / "outputs")
    done = call([*python_main(), *command(name, more=True)], cwd)
    assert done.returncode == 0, done.stdout
    losses = train_losses(cwd / "outputs")
    if name != "study":  # whose third trial is another run
        assert {step: losses[step] for step in begun} == begun
        assert f"resuming from the snapshot of step {STEPS} " in done.stdout
    assert losses == pytest.approx(expected, abs=1e-4)
