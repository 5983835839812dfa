"""A rank that is slowed down is named, whatever it is slow at, although all ranks finish every step
together.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TINY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataloader import TokenLoader
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.training.run import train_run
from multiprocess.ranks import configure, run_ranks

SLEEP_S = 0.2  # more than a loaded machine adds to a step
STEPS = [
    "trainer.max_steps=20",
    "trainer.log_every=4",
    "trainer.eval_every=null",
    "snapshot.every_steps=null",
]
# Overrides, and what rank 1 is slow at, or both ranks.
RUNS: dict[str, tuple[list[str], str]] = {
    "compute": ([], "compute"),
    "data": ([], "data wait"),
    "gloo": (["ddp.backend=gloo", "trainer.micro_batch_size=3"], "compute"),
    "fsdp": (["ddp.strategy=fsdp"], "compute"),
    "tensor": (["ddp.tensor_parallel=2", "model.n_head=2"], "compute"),
    "uneven": (["trainer.batch_size=3", "trainer.micro_batch_size=1"], "both"),
}


def train(configs: list[dict[str, Any]], slow_at: list[str]) -> None:
    """Train the runs in turn; rank 1, or both, sleep from step 9 on."""
    for job, (values, slow) in enumerate(zip(configs, slow_at, strict=True)):
        config = from_mapping(values)
        runtime = Runtime(config, read_env(), job)
        logs.to_console(runtime.group.env)
        if runtime.group.rank == 1 or slow == "both":
            _slow_down(slow)
        train_run(config, runtime, {})
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
    """Train all runs, one after the other, with the same two ranks."""
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


@pytest.mark.parametrize("name", [name for name, (_, slow) in RUNS.items() if slow != "both"])
def test_the_slow_rank_is_named(name, root):
    for rank in (0, 1):
        lines = (root / name / f"main.rank{rank}.log").read_text().splitlines()
        (line,) = [line for line in lines if "is slow:" in line]
        assert "WARNING rank 1 is slow: " in line
        found = re.search(r"x the median step since step (\d+) \((.*)\)$", line)
        # earlier if a loaded machine slowed the rank down before
        assert found and int(found[1]) <= 9, line
        assert found[2] == RUNS[name][1]
        assert any("rank 1 was slow in " in line for line in lines), lines[-5:]


@pytest.mark.parametrize("name", ["compute", "fsdp"])
def test_the_metrics_show_who_waits(name, root):
    """The whole step is as long on the rank that waits: only its work is shorter."""
    events = [
        EventAccumulator(str(root / name / "tensorboard" / f"rank{r}")).Reload() for r in (0, 1)
    ]
    last = {
        tag: [e.Scalars(tag)[-1].value for e in events]
        for tag in ("speed/work_ms", "speed/step_ms")
    }
    assert min(last["speed/step_ms"]) > 1e3 * SLEEP_S
    assert last["speed/work_ms"][0] < 1e3 * SLEEP_S / 2 < 1e3 * SLEEP_S < last["speed/work_ms"][1]
    assert events[0].Scalars("speed/slowest_rank")[-1].value == 1
    assert events[0].Scalars("speed/slowest_ratio")[-1].value > 1.3
    assert "speed/slowest_rank" not in events[1].Tags()["scalars"]


def test_more_micro_batches_do_not_make_a_rank_slow(root):
    """Rank 0 has two of three."""
    assert "is slow" not in (root / "uneven" / "main.rank0.log").read_text()


def test_the_run_is_the_same(root):
    """Slowness changes no number."""
    losses = {
        json.loads((root / name / "result.json").read_text())["val_loss"]
        for name in ("compute", "data")
    }
    assert len(losses) == 1
