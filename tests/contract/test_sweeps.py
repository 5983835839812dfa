"""Grid sweeps: killed and started again, with a job that fails."""

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
    digests,
    last_step,
    records,
    result,
    settings,
    shows,
    started,
    succeed,
    torchrun,
)

pytestmark = pytest.mark.timeout(900)

STEPS = 40
LAUNCHES = {"lock-step": [*torchrun(2), "-m"], "one parent": [*MAIN, "-m", "ddp.nproc_per_node=2"]}
EXIT_CODES = {"lock-step": 1, "one parent": 2}  # torchrun's own code is 1


def jobs(text: Path) -> list[str]:
    """Four, the third of which learns so fast that its loss is no number after a step."""
    values = {"trainer__max_steps": STEPS, "optimizer__schedule_steps": STEPS, "optimizer__lr": "1e-3,2e-3,1e30,3e-3"}
    return settings(text, **values, run__name="sweep")


def finished(sweep: Path) -> dict[str, tuple[float, dict[str, str]]]:
    """Loss and digests of the weights of the jobs that are complete, by directory."""
    found = [path.parent for path in sweep.glob("*/result.json") if result(path.parent)["status"] == "complete"]
    return {job.name: (result(job)["val_loss"], digests(job, STEPS)) for job in found}


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In lock-step; the failing job stops no other, and tells in the exit code."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    done = call([*LAUNCHES["lock-step"], *jobs(text)], cwd)
    assert done.returncode == EXIT_CODES["lock-step"], done.stdout
    return cwd / "outputs" / "sweep"


def test_directories_and_report(undisturbed: Path) -> None:
    names = sorted(finished(undisturbed))
    assert len(names) == 3
    for name, lr in zip(names, ("0.001", "0.002", "0.003"), strict=True):
        assert re.fullmatch(rf"optimizer\.lr={re.escape(lr)}-[0-9a-f]{{8}}", name)
    output = succeed([*REPORT, str(undisturbed)], undisturbed.parent)
    for name in names:
        assert shows(output, result(undisturbed / name)["val_loss"])
    assert (undisturbed / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("launch", LAUNCHES)
def test_killed_and_started_again(launch: str, undisturbed: Path, text: Path, tmp_path: Path) -> None:
    """What is complete is not trained again, the half-done job goes on, and the results are the undisturbed ones."""
    command = [*LAUNCHES[launch], *jobs(text)]
    sweep = tmp_path / "outputs" / "sweep"

    def half_done() -> list[Path]:
        running = [job for job in sweep.glob("optimizer.lr=0.002-*") if not (job / "result.json").exists()]
        return [job for job in running if committed(job) and last_step(job) >= 10]

    with started(command, tmp_path) as job:
        job.until(lambda: bool(half_done()), "a snapshot of the second job")
        job.kill_all()
    before = finished(sweep)
    assert len(before) == 1
    (complete,) = before
    trained = records(sweep / complete)
    written = (sweep / complete / "snapshots" / f"step_{STEPS:08d}" / "manifest.json").stat().st_mtime_ns
    (half,) = half_done()
    first = committed(half)[-1]

    done = call(command, tmp_path)
    assert done.returncode == EXIT_CODES[launch], done.stdout
    assert records(sweep / complete) == trained, "a complete job was trained again"
    assert (sweep / complete / "snapshots" / f"step_{STEPS:08d}" / "manifest.json").stat().st_mtime_ns == written
    check_not_trained_twice(half, first)
    assert finished(sweep) == finished(undisturbed)
