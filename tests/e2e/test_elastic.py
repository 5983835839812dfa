"""A run on 1, then 4, then 2, then 3 ranks equals the run on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from launching import TINY
from multiprocess.ranks import configure, run_ranks

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.training.run import train_run

STEPS = 32
# A rounding difference grows from step to step, with the learning rate: at three times this rate,
# it is 1e-4 after the last step, although as small after the first.
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"optimizer.schedule_steps={STEPS}",
    "optimizer.lr=1e-3",
    "snapshot.keep_last=9",
]
SIZES = (1, 3)  # sequences in a micro-batch


def train_all(configs: list[dict[str, Any]]) -> list[float | None]:
    losses = []
    for job, values in enumerate(configs):
        config = from_mapping(values)
        logs.to_console(read_env())
        runtime = Runtime(config, read_env(), job)
        losses.append(train_run(config, runtime, {}))
        runtime.close()
        del runtime
    return losses


def train(ranks: int, steps: int, root: Path) -> list[list[float | None]]:
    """Train with every micro-batch size in turn; return the losses by rank."""
    options = [f"trainer.max_steps={steps}", f"run.root={root}"]
    configs = [
        configure(*SETTINGS, *options, f"trainer.micro_batch_size={n}", f"run.name=micro{n}")
        for n in SIZES
    ]
    return run_ranks(ranks, train_all, root / f"ranks{ranks}-{steps}", configs=configs)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("uninterrupted")
    train(1, STEPS, root)
    return root


@pytest.fixture(scope="module")
def elastic(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("elastic")
    for ranks, steps in ((1, 8), (4, 16), (2, 24), (3, STEPS)):
        by_rank = train(ranks, steps, root)
        assert by_rank == [by_rank[0]] * ranks
    return root


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_another_number_of_ranks_at_every_resume(size, elastic, uninterrupted):
    one, other = elastic / f"micro{size}", uninterrupted / f"micro{size}"
    log = (one / "main.rank0.log").read_text()
    for ranks, step in ((4, 8), (2, 16), (3, 24)):
        assert f"on {ranks} x cpu" in log
        assert f"resuming from the snapshot of step {step}" in log
    assert result(one)["val_loss"] == pytest.approx(result(other)["val_loss"], abs=1e-5)
    assert result(one)["val_loss"] < 4.3, "nothing was trained"  # at the start it is 4.63
    weights = [
        safetensors.torch.load_file(r / f"snapshots/step_{STEPS:08d}/model.safetensors")
        for r in (one, other)
    ]
    assert (
        max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-5
    )
