"""Check jobs on a SLURM cluster of two nodes.

A preempted job saves, is requeued, and ends like an uninterrupted job.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from holding import HOOK, SETTINGS
from launching import ROOT, Job, python_main, wait_for
from runs import read_result, train, weights
from slurm_cluster import Slurm, SlurmUnavailable

pytestmark = pytest.mark.integration
SCRIPT = ROOT / "scripts" / "train.sbatch"

# Every rank of a job pauses once before this step. In an array, only the first job pauses.
PAUSE_BEFORE_STEP_7 = """
def reach(step, rank):
    if step == 7 and os.environ.get("SLURM_ARRAY_TASK_ID", "0") == "0":
        pause("step7")
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    try:
        cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    except SlurmUnavailable as reason:
        pytest.skip(f"there cannot be a SLURM cluster here: {reason}")
    with cluster:
        yield cluster


class Site:
    """The hook that pauses the ranks of a job before step 7."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "hold.py").write_text(HOOK + PAUSE_BEFORE_STEP_7)
        self.directory = directory
        self.word = f"+optimizer.code={directory}/hold.py"

    def wait_until_paused(self) -> None:
        self._wait_until("step7")

    def resume_after_signal(self) -> None:
        """Wait until both ranks have handled the signal, and let them resume."""
        self._wait_until("signal")
        (self.directory / "go").touch()

    def _wait_until(self, point: str) -> None:
        for rank in (0, 1):
            wait_for((self.directory / f"{point}.{rank}").exists, what=f"{point}.{rank}")


def check_resumed(run: Path, cwd: Path, *settings: str) -> None:
    """Check that the run resumed from step 7, and has the weights of an uninterrupted run."""
    assert read_result(run)["status"] == "complete"
    resumed = re.findall(
        r"resuming from the snapshot of step (\d+) ", (run / "main.rank0.log").read_text()
    )
    assert resumed == ["7"]
    whole = train(cwd / "whole", *SETTINGS, *settings, "ddp.nproc_per_node=2")
    assert weights(run) == weights(whole)


UNNAMED = [override for override in SETTINGS if override != "run.name=run"]


def test_a_name_in_the_form_that_a_report_prints(slurm, tmp_path):
    words = [*UNNAMED, '++run.name="lr/optimizer.lr=3e-4"', "trainer.max_steps=1"]
    job = slurm.submit(SCRIPT, tmp_path, [], words, PYTHONPATH=str(ROOT))
    slurm.wait(job, "COMPLETED")
    run = tmp_path / "outputs" / "lr" / "optimizer.lr=3e-4"
    assert read_result(run)["status"] == "complete"


def test_a_job_signalled_before_its_time_limit_is_requeued_and_resumes(slurm, tmp_path):
    """The script names the run after the job id unless `run.name` is set."""
    site = Site(tmp_path / "site")
    job = slurm.submit(SCRIPT, tmp_path, [], [*UNNAMED, site.word], PYTHONPATH=str(ROOT))
    site.wait_until_paused()
    slurm.call("scancel", "--signal=USR1", job)  # the same signal as from --signal=USR1@120
    site.resume_after_signal()
    slurm.wait(job, "COMPLETED")
    assert slurm.job(job)["Restarts"] == "1"
    check_resumed(tmp_path / "outputs" / f"slurm-{job}", tmp_path)


def test_a_failed_run_is_not_requeued(slurm, tmp_path):
    job = slurm.submit(
        SCRIPT, tmp_path, ["--nodes=1"], ["model.n_head=0"], PYTHONPATH=str(ROOT), MAX_RESTARTS="0"
    )
    slurm.wait(job, "FAILED")
    assert slurm.job(job)["Restarts"] == "0"
    assert "config error: model.n_head=0" in (tmp_path / f"{job}.out").read_text()
    assert not (tmp_path / "outputs").exists()


def test_a_preempted_job_of_a_sweep_is_requeued_and_resumes(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    site = Site(tmp_path / "site")
    args = [
        "-m",
        "sweep=slurm",
        *SETTINGS,
        site.word,
        "run.name=lr",
        "ddp.nproc_per_node=2",
        "hydra.launcher.cpus_per_task=1",
    ]
    extra = slurm.environment(PYTHONPATH=str(ROOT))
    sweep = Job([*python_main(), *args, "optimizer.lr=3e-4,1e-3"], tmp_path, **extra)
    site.wait_until_paused()
    first = "{}_0".format(slurm.call("squeue", "--noheader", "--format=%F").split()[0])
    node = slurm.call("squeue", "--noheader", f"--jobs={first}", "--format=%N").strip()
    options = ["--parsable", "--partition=urgent", f"--nodelist={node}", "--output=/dev/null"]
    urgent = slurm.call("sbatch", *options, "--wrap=true").strip()
    site.resume_after_signal()
    slurm.wait(urgent, "COMPLETED")
    assert sweep.wait() == 0, sweep.text()
    preempted, other = sorted((tmp_path / "outputs" / "lr").glob("optimizer.lr=*"))
    assert read_result(other)["status"] == "complete"
    assert "resuming" not in (other / "main.rank0.log").read_text()
    check_resumed(preempted, tmp_path, "optimizer.lr=3e-4")
