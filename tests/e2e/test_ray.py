"""Check sweeps on their own Ray cluster, where a concurrent job is killed or fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from launching import TINY, Job, committed, python_main, wait_for
from runs import fail

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip(
    "hydra_plugins.hydra_ray_launcher.ray_launcher", reason="hydra-ray-launcher is not installed"
)

pytestmark = pytest.mark.integration
SWEEP = [*python_main(), "-m", "sweep=ray", "hydra.launcher.ray.init.num_cpus=2", *TINY]


def results(sweep: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(sweep.glob("*/result.json"))]


def trainers(cwd: Path) -> list[int]:
    """Return the process ids of the workers in which Ray runs a job that was started in `cwd`."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            runs_job = (process / "cmdline").read_bytes().startswith(b"ray::_run_job")
            if runs_job and (process / "cwd").readlink() == cwd:
                pids.append(int(process.name))
    return pids


def test_a_killed_job_resumes_from_its_snapshot(tmp_path):
    overrides = [
        "run.name=kill",
        "optimizer.lr=1e-3,3e-4",
        "trainer.max_steps=400",
        "trainer.eval_every=null",
    ]
    job = Job([*SWEEP, *overrides], tmp_path, RAY_DEDUP_LOGS="0")
    sweep = tmp_path / "outputs" / "kill"
    try:
        wait_for(
            lambda: sum(len(committed(run)) > 0 for run in sweep.glob("optimizer*")) == 2,
            what="two snapshots",
        )
        os.kill(min(trainers(tmp_path)), signal.SIGKILL)
        assert job.wait() == 0, job.text()
    finally:
        if job.process.poll() is None:
            job.process.terminate()
    assert [(r["status"], r["step"]) for r in results(sweep)] == [("complete", 400)] * 2
    assert "resuming from the snapshot of step" in job.text()


def test_a_failed_job_does_not_stop_the_others(tmp_path):
    (tmp_path / "text.txt").write_text("hello world " * 400)
    overrides = [
        "run.name=bad",
        "data=text_file",
        "data.truncate=1",
        "data.path=missing.txt,text.txt",
    ]
    printed = fail([*SWEEP, *overrides], tmp_path, code=1)
    assert "data error: data.path=missing.txt: there is no such file" in printed
    assert printed.splitlines()[-1].startswith("job error: data.path=missing.txt failed")
    assert [r["status"] for r in results(tmp_path / "outputs" / "bad")] == ["complete"]
