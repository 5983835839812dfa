"""Kill -9 anything, start again: the weights are those of the run that nobody disturbed, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from launching import TINY, Job, committed, is_running, last_step, torchrun, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.history import METRICS, read_history

STEPS = 60
SETTINGS = [*TINY, "model.dropout=0.1", f"trainer.max_steps={STEPS}", "trainer.eval_every=25", "snapshot.every_steps=8"]
# Slow enough to be hit in the middle: one step takes 10 ms or more.
SETTINGS += ["model.n_embd=48", "data.block_size=64", "data.truncate=0.2", "trainer.batch_size=24"]


def start(ranks: int, name: str, cwd: Path, *options: str) -> Job:
    return Job([*torchrun(ranks, *options), *SETTINGS, f"run.name={name}"], cwd)


def weights(run: Path) -> bytes:
    return (run / "snapshots" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the run that nobody disturbed, by number of ranks."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    done: dict[int, bytes] = {}

    def get(ranks: int) -> bytes:
        if ranks not in done:
            job = start(ranks, f"ranks{ranks}", cwd)
            assert job.wait() == 0, job.text()
            done[ranks] = weights(cwd / "outputs" / f"ranks{ranks}")
        return done[ranks]

    return get


def two_steps(seed: str) -> list[int]:
    """Two random steps, the same at every run of the tests, far enough apart to be told apart."""
    generator = random.Random(seed)
    return [generator.randint(3, STEPS // 2 - 2), generator.randint(STEPS // 2 + 2, STEPS - 6)]


def reached(run: Path, step: int):
    """That step has been taken, and there is a snapshot to go on from."""
    return lambda: last_step(run) >= step and committed(run)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_worker_killed_under_max_restarts(ranks, tmp_path, undisturbed):
    run = tmp_path / "outputs" / "victim"
    job = start(ranks, "victim", tmp_path, "--max_restarts=2")
    for number, step in enumerate(two_steps(f"worker{ranks}")):
        wait_for(reached(run, step), what=f"step {step}")
        before = job.workers()
        job.kill_worker(number % ranks)
        wait_for(lambda: not any(map(is_running, before)), what="the end of the attempt")  # noqa: B023
    assert job.wait() == 0, job.text()
    assert job.text().count("resuming from the snapshot") == 2, job.text()
    assert weights(run) == undisturbed(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_agent_killed_alone(ranks, tmp_path, undisturbed):
    run = tmp_path / "outputs" / "victim"
    for step in two_steps(f"agent{ranks}"):
        job = start(ranks, "victim", tmp_path)
        wait_for(reached(run, step), what=f"step {step}")
        orphans = job.kill_agent()
        assert len(orphans) == ranks
        wait_for(lambda: not any(map(is_running, orphans)), timeout=5, what="the end of the orphans")  # noqa: B023
    job = start(ranks, "victim", tmp_path)
    assert job.wait() == 0, job.text()
    assert "resuming from the snapshot" in job.text()
    assert weights(run) == undisturbed(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_tree_killed(ranks, tmp_path, undisturbed):
    run = tmp_path / "outputs" / "victim"
    for step in two_steps(f"tree{ranks}"):
        job = start(ranks, "victim", tmp_path)
        wait_for(reached(run, step), what=f"step {step}")
        job.kill_tree()
    job = start(ranks, "victim", tmp_path)
    assert job.wait() == 0, job.text()
    assert "resuming from the snapshot" in job.text()
    assert weights(run) == undisturbed(ranks)
    for rank in range(ranks):
        assert logged_steps(run, rank) == list(range(1, STEPS + 1)), "a point is doubled or missing"
    history = read_history(run / METRICS)
    assert [step for step, _ in history.series("train_loss")] == list(range(1, STEPS + 1))
    assert history.faults == 2


def logged_steps(run: Path, rank: int) -> list[int]:
    """The steps of a rank's loss curve, as TensorBoard reads them."""
    events = EventAccumulator(str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("train/loss")]
