"""The state that a plan for GPUs counts is the one that ranks over gloo hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launching import TINY
from tasks import take_step
from torch import Tensor

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.gpus import Machine
from mingpt_ddp.models.dtensor import local_tensor
from mingpt_ddp.planning.gpu_plan import make_gpu_plan
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable
from multiprocess.ranks import configure, run_ranks

# 3 ranks divide neither the rows nor the parameters evenly
MODEL = [*TINY, "model.dropout=0.0", "trainer.batch_size=12", "trainer.micro_batch_size=2"]


def held(config: dict[str, Any]) -> dict[str, int]:
    """Take a step; return the bytes that this rank holds."""
    parsed = from_mapping(config)
    runtime = Runtime(parsed, read_env())
    try:
        task = build_task(parsed, runtime.group, {})
        loader = task.train_loader(runtime.device)
        trainable = build_trainable(runtime, task)
        plan = plan_batches(parsed, runtime.group.data_size)
        take_step(TrainStep(runtime, task, loader, plan, trainable), 1)
        loader.close()
        state = [
            value
            for values in trainable.optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        return {
            "weights_bytes": sum(local_tensor(p).nbytes for p in trainable.model.parameters()),
            "optimizer_bytes": sum(local_tensor(tensor).nbytes for tensor in state),
        }
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("ddp", "adamw"),
        ("ddp", "muon"),
        ("zero1", "adamw"),
        ("zero1", "muon"),
        ("fsdp", "adamw"),
        ("fsdp", "sgd"),
    ],
)
def test_planned_state_is_that_of_ranks(strategy, optimizer, tmp_path):
    words = [*MODEL, f"optimizer={optimizer}", f"data.cache_dir={tmp_path / 'cache'}"]
    config = configure(*words, f"ddp.strategy={strategy}")
    ranks = run_ranks(3, held, tmp_path / "ranks", config=config)
    parsed = from_mapping(configure(*words, "trainer.precision=bf16"))
    planned = make_gpu_plan(
        replace(parsed, ddp=replace(parsed.ddp, nproc_per_node=3)), Machine("h100")
    )["gpu"]["strategies"][strategy]
    for name in ("weights_bytes", "optimizer_bytes"):
        assert planned[name] == max(rank[name] for rank in ranks), name
