"""Check that an interrupted run resumes and ends like an uninterrupted run.

It is killed, preempted, continued on another number of ranks, or keeps its snapshots in S3.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .contract import (
    MAIN,
    SAMPLE,
    SNAPSHOTS,
    STEPS,
    Job,
    check_equal_runs,
    check_not_trained_twice,
    committed,
    digests,
    last_step,
    result,
    settings,
    started,
    succeed,
    torchrun,
    wait_for,
    weights,
)

pytestmark = pytest.mark.timeout(900)

LAUNCHES = {
    "plain": (1, MAIN),
    "torchrun 2": (2, torchrun(2, "--max_restarts=2")),
    "nproc_per_node 2": (2, [*MAIN, "ddp.nproc_per_node=2"]),
    "torchrun 3": (3, torchrun(3, "--max_restarts=2")),
}


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that trains an uninterrupted run on a number of ranks and returns its directory."""
    runs: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in runs:
            cwd = tmp_path_factory.mktemp(f"uninterrupted{ranks}")
            succeed([*(MAIN if ranks == 1 else torchrun(ranks)), *settings(text)], cwd)
            runs[ranks] = cwd / "outputs" / "run"
        return runs[ranks]

    return get


def reach(job: Job, run: Path, step: int, after: int = 0) -> int:
    """Wait for a step, and for a snapshot of a step later than `after`. Return the step of the newest snapshot."""
    job.until(lambda: last_step(run) >= step and max(committed(run), default=0) > after, f"step {step}")
    return committed(run)[-1]


@pytest.mark.parametrize(
    "launch", ["torchrun 2", "nproc_per_node 2", pytest.param("torchrun 3", marks=pytest.mark.slow)]
)
def test_killed_twice(launch: str, uninterrupted: Callable[[int], Path], text: Path, tmp_path: Path) -> None:
    """Kill a worker, which is restarted, then the agent alone or all processes. Run the same command again."""
    ranks, command = LAUNCHES[launch]
    reference = uninterrupted(ranks)
    run = tmp_path / "outputs" / "run"
    with started([*command, *settings(text)], tmp_path) as job:
        first = reach(job, run, 15)
        job.kill_worker(ranks - 1)
        reach(job, run, last_step(run) + 10, after=first)  # the ranks reach this step only if the worker is restarted
        if launch == "torchrun 2":
            job.kill_launcher()
        else:
            job.kill_all()
        assert not (run / "result.json").exists()
        assert last_step(run) < STEPS
    succeed([*command, *settings(text)], tmp_path)
    check_not_trained_twice(run, first)
    check_equal_runs(run, reference, ranks)


@pytest.mark.parametrize("launch", ["plain", "nproc_per_node 2"])
def test_preempted(launch: str, uninterrupted: Callable[[int], Path], text: Path, tmp_path: Path) -> None:
    """On SIGTERM, the run saves the current step and exits with code 0. The same command then completes it."""
    ranks, command = LAUNCHES[launch]
    reference = uninterrupted(ranks)
    run = tmp_path / "outputs" / "run"
    with started([*command, *settings(text)], tmp_path) as job:
        reach(job, run, 15)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0, job.text()
        wait_for(lambda: not job.processes(), "the end of all processes")
    stopped = result(run)
    assert stopped["status"] == "preempted"
    assert 15 <= stopped["step"] < STEPS
    assert committed(run)[-1] == stopped["step"]
    succeed([*command, *settings(text)], tmp_path)
    check_not_trained_twice(run, stopped["step"])
    check_equal_runs(run, reference, ranks)


def test_elastic(uninterrupted: Callable[[int], Path], text: Path, tmp_path: Path) -> None:
    """A run on two ranks, then one, then two equals a run on two ranks, except for rounding."""
    run = tmp_path / "outputs" / "run"
    for launch, ranks, steps in (("torchrun 2", 2, 28), ("plain", 1, 55), ("nproc_per_node 2", 2, STEPS)):
        succeed([*LAUNCHES[launch][1], *settings(text, trainer__max_steps=steps)], tmp_path)
        assert (result(run)["step"], result(run)["world_size"]) == (steps, ranks)
    check_not_trained_twice(run, STEPS)
    reference = result(uninterrupted(2))
    assert result(run)["val_loss"] == pytest.approx(reference["val_loss"], abs=1e-5)
    assert result(run)["epoch"] == reference["epoch"]


# S3


@pytest.fixture
def s3(seaweed: Any, tmp_path: Path) -> dict[str, str]:
    """Return environment variables for a client of a SeaweedFS server on this machine."""
    nothing = str(tmp_path / "none")
    return {**seaweed.environment(), "AWS_CONFIG_FILE": nothing, "AWS_SHARED_CREDENTIALS_FILE": nothing}


def s3_client(environment: dict[str, str]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def test_snapshots_in_s3(uninterrupted: Callable[[int], Path], s3: dict[str, str], text: Path, tmp_path: Path) -> None:
    """A run is killed and resumed. Its snapshots are verified and sampled from the object store."""
    client = s3_client(s3)
    client.mkdir("contract")
    command = [*MAIN, "ddp.nproc_per_node=2", *settings(text, snapshot__path="s3://contract/runs")]
    run = tmp_path / "outputs" / "run"

    def committed_in_s3() -> list[int]:
        manifests = client.glob("contract/runs/run/step_*/manifest.json")
        return sorted(int(path.split("/")[-2].removeprefix("step_")) for path in manifests)

    with started(command, tmp_path, **s3) as job:
        job.until(lambda: last_step(run) >= 15 and bool(committed_in_s3()), "step 15 and a snapshot in S3")
        first = committed_in_s3()[-1]
        job.kill_all()
        assert last_step(run) < STEPS
    succeed(command, tmp_path, **s3)
    check_not_trained_twice(run, first)
    assert committed(run) == [], "snapshots were written to the local disk"
    local = weights(uninterrupted(2))
    for name, content in local.items():
        assert client.cat_file(f"contract/runs/run/step_{STEPS:08d}/{name}") == content, name
    assert result(run)["val_loss"] == result(uninterrupted(2))["val_loss"]

    succeed([*SNAPSHOTS, "verify", "s3://contract/runs/run"], tmp_path, **s3)
    args = ["snapshot=s3://contract/runs/run", "prompt=the king", "max_new_tokens=5"]
    assert succeed([*SAMPLE, *args], tmp_path, **s3).startswith("the king")


def test_the_references_differ(uninterrupted: Callable[[int], Path]) -> None:
    """Comparing bytes proves something only if the bytes of different steps differ."""
    run = uninterrupted(1)
    earlier = next(step for step in committed(run) if step < STEPS)
    assert digests(run, earlier) != digests(run)
