"""A SLURM cluster of two nodes: a job told to make room saves, is queued again, and ends like one undisturbed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import ROOT, Job, python_main, wait_for
from multiprocess.ranks import configure, run_ranks
from pause_points import SETTINGS, SITE, patches, train, weights
from slurm_cluster import NoSlurm, Slurm

pytestmark = pytest.mark.integration
SCRIPT = ROOT / "scripts" / "train.sbatch"

# Every rank of a job waits before this step once; of an array the first job.
HOLD_BEFORE_STEP_7 = """
def patch(loader):
    step_of = loader.TokenLoader.get_batch
    settling = [True]
    def step(self, number, plan, rank):
        if number == 7 and not settling[0] and os.environ.get("SLURM_ARRAY_TASK_ID", "0") == "0":
            hold("step7")
        settling[0] = False
        return step_of(self, number, plan, rank)
    loader.TokenLoader.get_batch = step
PATCHES["mingpt_ddp.data.dataloader"] = patch
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
    """The module that holds the ranks of a job before step 7: see `held`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(SITE)
        (directory / "patches.py").write_text(patches(HOLD_BEFORE_STEP_7))
        self.directory = directory
        self.path = f"{directory}:{ROOT}"

    def held(self) -> None:
        self._wait_until("step7")

    def told(self) -> None:
        """Both ranks have been told to make room; they may go on now."""
        self._wait_until("signal")
        (self.directory / "go").touch()

    def _wait_until(self, point: str) -> None:
        for rank in (0, 1):
            wait_for((self.directory / f"{point}.{rank}").exists, what=f"{point}.{rank}")


def check_resumed(run: Path, cwd: Path, *settings: str) -> None:
    """From step 7, to the same end as the run that nobody disturbed."""
    assert json.loads((run / "result.json").read_text())["status"] == "complete"
    resumed = re.findall(r"resuming from the snapshot of step (\d+) ", (run / "main.rank0.log").read_text())
    assert resumed == ["7"]
    run_ranks(2, train, cwd / "ranks", values=configure(*SETTINGS, *settings, f"run.root={cwd}"))
    assert weights(run) == weights(cwd / "run")


@pytest.mark.parametrize("word", [None, '++run.name="lr/optimizer.lr=3e-4"'])
def test_told_before_the_time_is_over(word, slurm, tmp_path):
    """The script finds the run by its job's number, or by a name as a report writes it."""
    site = Site(tmp_path / "site")
    words = [word for word in [*SETTINGS, word] if word and word != "run.name=run"]
    job = slurm.submit(SCRIPT, tmp_path, [], words, PYTHONPATH=site.path)
    site.held()
    slurm.call("scancel", "--signal=USR1", job)  # as --signal=USR1@120 does
    site.told()
    slurm.wait(job, "COMPLETED")
    assert slurm.job(job)["Restarts"] == "1"
    check_resumed(tmp_path / "outputs" / (word.split('"')[1] if word else f"slurm-{job}"), tmp_path)


def test_a_run_that_fails_by_itself_is_not_queued_again(slurm, tmp_path):
    job = slurm.submit(SCRIPT, tmp_path, ["--nodes=1"], ["model.n_head=0"], PYTHONPATH=str(ROOT), MAX_RESTARTS="0")
    slurm.wait(job, "FAILED")
    assert slurm.job(job)["Restarts"] == "0"
    assert "config error: model.n_head=0" in (tmp_path / f"{job}.out").read_text()
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_of_jobs_one_of_which_makes_room_for_a_more_urgent_one(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    site = Site(tmp_path / "site")
    words = ["-m", "sweep=slurm", *SETTINGS, "run.name=lr", "ddp.nproc_per_node=2", "hydra.launcher.cpus_per_task=1"]
    extra = slurm.environment(PYTHONPATH=site.path)
    sweep = Job([*python_main(), *words, "optimizer.lr=3e-4,1e-3"], tmp_path, **extra)
    site.held()
    first = "{}_0".format(slurm.call("squeue", "--noheader", "--format=%F").split()[0])
    node = slurm.call("squeue", "--noheader", f"--jobs={first}", "--format=%N").strip()
    options = ["--parsable", "--partition=urgent", f"--nodelist={node}", "--output=/dev/null"]
    urgent = slurm.call("sbatch", *options, "--wrap=true").strip()
    site.told()
    slurm.wait(urgent, "COMPLETED")
    assert sweep.wait() == 0, sweep.text()
    slower, faster = sorted((tmp_path / "outputs" / "lr").glob("optimizer.lr=*"))
    assert json.loads((faster / "result.json").read_text())["status"] == "complete"
    assert "resuming" not in (faster / "main.rank0.log").read_text()
    check_resumed(slower, tmp_path, "optimizer.lr=3e-4")
