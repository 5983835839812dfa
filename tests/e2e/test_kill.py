"""SIGKILL processes of a run in every way and start it again.

The weights must equal those of the uninterrupted run byte for byte.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from holding import HeldJob
from launching import TINY, committed, is_running, python_main, torchrun, wait_for
from runs import curve, read_history, tensor_files

STEPS = 60
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=25",
    "snapshot.every_steps=8",
    "trainer.ema=0.9",
    "trainer.patience=9",
    "optimizer.weight_decay_schedule=linear",
    "model.n_embd=48",
    "data.block_size=64",
    "data.truncate=0.2",
    "trainer.batch_size=24",
]
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


def start(path: str, ranks: int, cwd: Path, held: dict[int, int] | None = None) -> HeldJob:
    keys = {override.partition("=")[0] for override in PATHS[path]}
    settings = [override for override in SETTINGS if override.partition("=")[0] not in keys]
    forked = [*python_main(), f"ddp.nproc_per_node={ranks}"]
    launcher = torchrun(ranks, "--max_restarts=2") if path == "plain" else forked
    words = [*PATHS[path], *settings, "run.name=run"]
    return HeldJob([*launcher, *words], cwd, held or {}, group="model")


def one_step_per_quarter(seed: str) -> list[int]:
    """Return a random step in each quarter of the run. Each comes after the first snapshot.

    The same seed gives the same steps.
    """
    generator, quarter = random.Random(seed), STEPS // 4
    steps = []
    for first in range(0, STEPS, quarter):
        steps.append(generator.randint(max(first + 3, 9), first + quarter - 3))
    return steps


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
    """Kill a worker twice, which its parent restarts, then only the parent, then all processes."""
    uninterrupted = start(path, ranks, tmp_path / "uninterrupted").job
    assert uninterrupted.wait() == 0, uninterrupted.text()

    run, steps = tmp_path / "outputs" / "run", one_step_per_quarter(f"{path} {ranks}")
    is_saved = lambda: committed(run)  # noqa: E731
    held = start(path, ranks, tmp_path, {steps[0]: 0, steps[1]: 1, steps[2]: 0})
    job = held.job
    for attempt in (0, 1):
        held.wait_for_step(steps[attempt], is_saved)
        before = job.workers()
        job.kill_worker(attempt)
        wait_for(lambda: not any(map(is_running, before)), what="the end of the attempt")  # noqa: B023
    held.wait_for_step(steps[2], is_saved)
    orphans = job.kill_agent()
    assert len(orphans) == ranks
    wait_for(lambda: not any(map(is_running, orphans)), what="the end of the orphans")
    held = start(path, ranks, tmp_path, {steps[3]: 0})
    held.wait_for_step(steps[3], is_saved)
    held.job.kill_tree()
    job = start(path, ranks, tmp_path).job
    assert job.wait() == 0, job.text()

    assert tensor_files(run, STEPS) == tensor_files(tmp_path / "uninterrupted/outputs/run", STEPS)
    assert (run / "main.rank0.log").read_text().count("resuming from the snapshot") == 4
    for rank in range(ranks):
        logged = [step for step, _ in curve(run, rank=rank)]
        assert logged == list(range(1, STEPS + 1)), "a point is duplicated or missing"
    history = read_history(run)
    assert [step for step, _ in history.series("train_loss")] == list(range(1, STEPS + 1))
    assert history.starts == 5
