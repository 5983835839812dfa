"""A SLURM cluster of two nodes: a job told to make room saves, is queued again, and ends like one undisturbed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from held import SETTINGS, SITE, patches, train, weights
from launching import ROOT, wait_for
from multiprocess.ranks import configure, run_ranks
from slurm import NoSlurm, Slurm

SCRIPT = ROOT / "scripts" / "train.sbatch"

# Every rank waits before these steps until the file `go` is there; `hold` waits at each of them once.
HOLD_AT_STEPS = """
def patch(loader):
    step_of = loader.Loader.step
    settling = [True]
    def step(self, number, plan, rank):
        if number in <steps> and not settling[0]:
            hold(f"step{number}")
        settling[0] = False
        return step_of(self, number, plan, rank)
    loader.Loader.step = step
PATCHES["mingpt_ddp.loader"] = patch
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    try:
        cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    except NoSlurm as reason:
        pytest.skip(f"there cannot be a SLURM cluster here: {reason}")
    with cluster:
        yield cluster


class Site:
    """The module that holds the ranks of a job: see `held`."""

    def __init__(self, directory: Path, *steps: int) -> None:
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(SITE)
        (directory / "patches.py").write_text(patches(HOLD_AT_STEPS, steps=steps))
        self.directory = directory

    def wait_until(self, point: str) -> None:
        """Both ranks have come there."""
        for rank in (0, 1):
            wait_for((self.directory / f"{point}.{rank}").exists, what=f"{point}.{rank}")

    def told(self) -> None:
        """Both ranks have been told to make room; let them go on, and be ready for the next time."""
        self.wait_until("signal")
        (self.directory / "go").touch()

    def again(self) -> None:
        for name in ("go", "signal.0", "signal.1"):
            (self.directory / name).unlink()


def paths(site: Site | None = None) -> str:
    return ":".join([*([str(site.directory)] if site else []), str(ROOT)])


def test_told_to_make_room_twice(slurm, tmp_path):
    """By the signal before the time limit, and by a job that goes first; the run begins where it stopped."""
    site = Site(tmp_path / "site", 7, 13)
    job = slurm.submit(SCRIPT, tmp_path, [], SETTINGS[:-1], PYTHONPATH=paths(site))
    site.wait_until("step7")
    slurm.call("scancel", "--signal=USR1", job)  # what --signal=USR1@120 does
    site.told()
    slurm.wait(job, "PENDING")
    site.again()
    site.wait_until("step13")
    urgent = slurm.call("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--wrap=true", "--output=/dev/null")
    site.told()
    slurm.wait(urgent.strip(), "COMPLETED")
    slurm.wait(job, "COMPLETED")
    run = tmp_path / "outputs" / f"slurm-{job}"
    assert slurm.job(job)["Restarts"] == "2"
    assert json.loads((run / "result.json").read_text())["status"] == "complete"
    resumed = re.findall(r"resuming from the snapshot of step (\d+) ", (run / "main.rank0.log").read_text())
    assert resumed == ["7", "13"]
    run_ranks(2, train, tmp_path / "ranks", values=configure(*SETTINGS, f"run.root={tmp_path}"))
    assert weights(run) == weights(tmp_path / "run")


def test_a_run_that_fails_by_itself_is_not_queued_again(slurm, tmp_path):
    job = slurm.submit(SCRIPT, tmp_path, ["--nodes=1"], ["model.n_head=0"], PYTHONPATH=paths(), MAX_RESTARTS="0")
    slurm.wait(job, "FAILED")
    assert slurm.job(job)["Restarts"] == "0"
    assert "config error: model.n_head=0" in (tmp_path / f"{job}.out").read_text()
    assert not (tmp_path / "outputs").exists()
