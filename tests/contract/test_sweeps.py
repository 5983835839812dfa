"""Check that grid sweeps survive kills, and that a failing job does not stop the other jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .contract import (
    MAIN,
    REPORT,
    call,
    check_not_trained_twice,
    committed,
    contains_value,
    digests,
    last_step,
    records,
    result,
    settings,
    started,
    succeed,
    torchrun,
)

pytestmark = pytest.mark.timeout(900)

STEPS = 40
LAUNCHES = {"lock-step": [*torchrun(2), "-m"], "one parent": [*MAIN, "-m", "ddp.nproc_per_node=2"]}
EXIT_CODES = {"lock-step": 1, "one parent": 2}  # torchrun exits with 1 whatever its workers' codes are


def jobs(text: Path) -> list[str]:
    """Return the overrides of four jobs. The third one's learning rate makes its loss non-finite after a step."""
    values = {"trainer__max_steps": STEPS, "optimizer__schedule_steps": STEPS, "optimizer__lr": "1e-3,2e-3,1e30,3e-3"}
    return settings(text, **values, run__name="sweep")


def finished(sweep: Path) -> dict[str, tuple[float, dict[str, str]]]:
    """Return the loss and the digests of each complete job by directory name."""
    found = [path.parent for path in sweep.glob("*/result.json") if result(path.parent)["status"] == "complete"]
    return {job.name: (result(job)["val_loss"], digests(job, STEPS)) for job in found}


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep under torchrun. The failing job does not stop the others, and sets the exit code."""
    cwd = tmp_path_factory.mktemp("uninterrupted")
    done = call([*LAUNCHES["lock-step"], *jobs(text)], cwd)
    assert done.returncode == EXIT_CODES["lock-step"], done.stdout
    return cwd / "outputs" / "sweep"


def test_directories_and_report(uninterrupted: Path) -> None:
    names = sorted(finished(uninterrupted))
    assert len(names) == 3
    for name, lr in zip(names, ("0.001", "0.002", "0.003"), strict=True):
        assert re.fullmatch(rf"optimizer\.lr={re.escape(lr)}-[0-9a-f]{{8}}", name)
    output = succeed([*REPORT, str(uninterrupted)], uninterrupted.parent)
    for name in names:
        assert contains_value(output, result(uninterrupted / name)["val_loss"])
    assert (uninterrupted / "report.html").stat().st_size > 1000


def test_two_jobs_at_a_time(uninterrupted: Path, text: Path, tmp_path: Path) -> None:
    """Concurrent jobs have the results of jobs that run one after another. A failing job does not stop the others."""
    done = call([*LAUNCHES["one parent"], *jobs(text), "sweep.parallel=2"], tmp_path)
    assert done.returncode == EXIT_CODES["one parent"], done.stdout
    assert finished(tmp_path / "outputs" / "sweep") == finished(uninterrupted)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_killed_and_started_again(launch: str, uninterrupted: Path, text: Path, tmp_path: Path) -> None:
    """Complete jobs are not trained again, the interrupted job resumes, and the kill does not change the results."""
    command = [*LAUNCHES[launch], *jobs(text)]
    sweep = tmp_path / "outputs" / "sweep"

    def unfinished() -> list[Path]:
        running = [job for job in sweep.glob("optimizer.lr=0.002-*") if not (job / "result.json").exists()]
        return [job for job in running if committed(job) and last_step(job) >= 10]

    with started(command, tmp_path) as job:
        job.until(lambda: bool(unfinished()), "a snapshot of the second job")
        job.kill_all()
    before = finished(sweep)
    assert len(before) == 1
    (complete,) = before
    trained = records(sweep / complete)
    written = (sweep / complete / "snapshots" / f"step_{STEPS:08d}" / "manifest.json").stat().st_mtime_ns
    (interrupted,) = unfinished()
    first = committed(interrupted)[-1]

    done = call(command, tmp_path)
    assert done.returncode == EXIT_CODES[launch], done.stdout
    assert records(sweep / complete) == trained, "a complete job was trained again"
    assert (sweep / complete / "snapshots" / f"step_{STEPS:08d}" / "manifest.json").stat().st_mtime_ns == written
    check_not_trained_twice(interrupted, first)
    assert finished(sweep) == finished(uninterrupted)
