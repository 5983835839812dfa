"""The metrics name a slow rank, although all ranks finish every step together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.data.dataloader import TokenLoader
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import read_env
from mingpt_ddp.training.run import train_run
from multiprocess.ranks import configure, run_ranks

SLEEP_S = 0.2  # more than a busy machine adds to a step
STEPS = [
    "trainer.max_steps=20",
    "trainer.log_every=4",
    "trainer.eval_every=null",
    "snapshot.every_steps=null",
]
# Overrides, and the part of a step in which rank 1 is slow.
RUNS: dict[str, tuple[list[str], str]] = {
    "compute": ([], "compute"),
    "data": ([], "data wait"),
    "gloo": (["ddp.backend=gloo", "trainer.micro_batch_size=3"], "compute"),
    "fsdp": (["ddp.strategy=fsdp"], "compute"),
}


def train(configs: list[dict[str, Any]], slow_at: list[str]) -> None:
    """Train one run after another. From step 9 on, rank 1 sleeps."""
    for job, (values, slow) in enumerate(zip(configs, slow_at, strict=True)):
        config = from_mapping(values)
        runtime = Runtime(config, read_env(), job)
        logs.to_console(runtime.group.env)
        if runtime.group.rank == 1:
            _slow_down(slow)
        train_run(Job(config), runtime)
        runtime.close()
        _restore()


_originals = {"get_batch": TokenLoader.get_batch, "forward": torch.nn.Embedding.forward}


def _slow_down(slow: str) -> None:
    steps = {"now": 0}

    def get_batch(self: Any, step: int, *arguments: Any) -> Any:
        steps["now"] = step
        time.sleep(SLEEP_S if step > 8 and slow == "data wait" else 0.0)
        return _originals["get_batch"](self, step, *arguments)

    def forward(self: Any, x: Any) -> Any:
        time.sleep(SLEEP_S if steps["now"] > 8 and slow != "data wait" else 0.0)
        return _originals["forward"](self, x)

    TokenLoader.get_batch, torch.nn.Embedding.forward = get_batch, forward


def _restore() -> None:
    TokenLoader.get_batch, torch.nn.Embedding.forward = (
        _originals["get_batch"],
        _originals["forward"],
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Train all runs, one after another, with the same two ranks."""
    root = tmp_path_factory.mktemp("stragglers")
    where = [f"run.root={root}", f"data.cache_dir={root / 'cache'}"]
    configs = [
        configure(*TINY, *STEPS, *words, *where, f"run.name={name}")
        for name, (words, _) in RUNS.items()
    ]
    run_ranks(
        2, train, root / "ranks", configs=configs, slow_at=[slow for _, slow in RUNS.values()]
    )
    return root


def scalars(run: Path) -> list[EventAccumulator]:
    """Return the logged scalars of each rank."""
    return [EventAccumulator(str(run / "tensorboard" / f"rank{rank}")).Reload() for rank in (0, 1)]


@pytest.mark.parametrize("name", ["compute", "data", "gloo"])
def test_the_metrics_show_who_waits(name, root):
    """On the rank that waits, the whole step takes as long, but its work is shorter."""
    events = scalars(root / name)
    work, step = (
        [each.Scalars(tag)[-1].value for each in events]
        for tag in ("speed/work_ms", "speed/step_ms")
    )
    assert min(step) > 1e3 * SLEEP_S
    assert work[0] < work[1] and work[1] > 1e3 * SLEEP_S
    assert events[0].Scalars("speed/slowest_rank")[-1].value == 1
    assert events[0].Scalars("speed/slowest_ratio")[-1].value > 1.3
    assert "speed/slowest_rank" not in events[1].Tags()["scalars"]


def test_passes_that_wait_for_other_ranks_are_not_measured(root):
    for events in scalars(root / "fsdp"):
        assert not {"speed/work_ms", "speed/slowest_rank"} & {*events.Tags()["scalars"]}


def test_a_slow_rank_does_not_change_results(root):
    losses = {
        json.loads((root / name / "result.json").read_text())["val_loss"]
        for name in ("compute", "data")
    }
    assert len(losses) == 1
