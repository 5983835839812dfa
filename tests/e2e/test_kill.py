"""SIGKILL any process and start again: the weights are those of the uninterrupted run, byte for
byte.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from launching import TINY, Job, committed, is_running, last_step, python_main, torchrun, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.metrics.jsonl import METRICS, read_history

STEPS = 60
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=25",
    "snapshot.every_steps=8",
]
SETTINGS += [
    "trainer.ema=0.9",
    "trainer.patience=9",
    "optimizer.weight_decay_schedule=linear",
]
# Slow enough to be killed in mid-run: a step takes 10 ms or more.
SETTINGS += ["model.n_embd=48", "data.block_size=64", "data.truncate=0.2", "trainer.batch_size=24"]
PATHS = {
    "plain": ["model=gpt_nano", "optimizer=adamw", "trainer.precision=fp32"],
    "fast": ["model=modern_nano", "optimizer=muon", "trainer.precision=bf16"],
}
for strategy in ("zero1", "fsdp"):
    PATHS[strategy] = [*PATHS["plain"], f"ddp.strategy={strategy}"]
PATHS["tensor_parallel"] = [
    *PATHS["plain"],
    "ddp.tensor_parallel=2",
    "model.n_head=4",
    "model.dropout=0.0",
]


def start(path: str, ranks: int, cwd: Path) -> Job:
    keys = {override.partition("=")[0] for override in PATHS[path]}
    settings = [override for override in SETTINGS if override.partition("=")[0] not in keys]
    forked = [*python_main(), f"ddp.nproc_per_node={ranks}"]
    launcher = torchrun(ranks, "--max_restarts=2") if path == "plain" else forked
    return Job([*launcher, *PATHS[path], *settings, "run.name=run"], cwd)


def weights(run: Path) -> dict[str, bytes]:
    files = sorted((run / "snapshots" / f"step_{STEPS:08d}").glob("*.safetensors"))
    return {file.name: file.read_bytes() for file in files}


def one_step_per_quarter(seed: str) -> list[int]:
    """Return a random step in each quarter of the run, the same for the same seed."""
    generator, quarter = random.Random(seed), STEPS // 4
    return [generator.randint(first + 3, first + quarter - 3) for first in range(0, STEPS, quarter)]


def reached(run: Path, step: int, attempt: int):
    """Whether this attempt (from 0) has taken this step, and there is a snapshot to resume from."""

    def is_reached() -> bool:
        log = run / "main.rank0.log"
        resumed = log.exists() and log.read_text().count("resuming from the snapshot") >= attempt
        return resumed and last_step(run) >= step and bool(committed(run))

    return is_reached


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        ("plain", 2),
        pytest.param("fast", 3, marks=SLOW),
        pytest.param("zero1", 2, marks=SLOW),
        pytest.param("fsdp", 3, marks=SLOW),
        pytest.param("tensor_parallel", 2, marks=SLOW),
    ],
)
def test_killed_in_every_way(path, ranks, tmp_path):
    """A worker, which its parent restarts, twice; then the parent alone; then all processes."""
    (tmp_path / "uninterrupted").mkdir()
    uninterrupted = start(path, ranks, tmp_path / "uninterrupted")
    assert uninterrupted.wait() == 0, uninterrupted.text()

    run, steps = tmp_path / "outputs" / "run", one_step_per_quarter(f"{path} {ranks}")
    job = start(path, ranks, tmp_path)
    for attempt in (0, 1):
        wait_for(reached(run, steps[attempt], attempt), what=f"step {steps[attempt]}")
        before = job.workers()
        job.kill_worker(attempt % ranks)
        wait_for(lambda: not any(map(is_running, before)), what="the end of the attempt")  # noqa: B023
    wait_for(reached(run, steps[2], 2), what=f"step {steps[2]}")
    orphans = job.kill_agent()
    assert len(orphans) == ranks
    wait_for(lambda: not any(map(is_running, orphans)), what="the end of the orphans")
    job = start(path, ranks, tmp_path)
    wait_for(reached(run, steps[3], 3), what=f"step {steps[3]}")
    job.kill_tree()
    job = start(path, ranks, tmp_path)
    assert job.wait() == 0, job.text()

    assert weights(run) == weights(tmp_path / "uninterrupted" / "outputs" / "run")
    assert (run / "main.rank0.log").read_text().count("resuming from the snapshot") == 4
    for rank in range(ranks):
        assert logged_steps(run, rank) == list(range(1, STEPS + 1)), (
            "a point is duplicated or missing"
        )
    history = read_history(run / METRICS)
    assert [step for step, _ in history.series("train_loss")] == list(range(1, STEPS + 1))
    assert history.faults == 4


def logged_steps(run: Path, rank: int) -> list[int]:
    """Return the steps of the loss curve of a rank, as TensorBoard reads them."""
    events = EventAccumulator(
        str(run / "tensorboard" / f"rank{rank}"), size_guidance={"scalars": 0}
    ).Reload()
    return [event.step for event in events.Scalars("train/loss")]
