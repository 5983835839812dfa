"""How a run ends and what it keeps: early stopping, milestones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from launching import TINY
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.run_dir import read_result
from mingpt_ddp.training.run import run
from mingpt_ddp.training.train_state import TrainState, count_patience, has_stopped_early

# No loss is lower than another by 100 nats: the first evaluation, at step 2, remains the best.
SETTINGS = [*TINY, "trainer.device=cpu", "trainer.eval_every=2", "trainer.min_delta=100", "optimizer.schedule_steps=12"]


def train(root: Path, *overrides: str) -> dict[str, Any]:
    """Train in this process; return result.json."""
    config = from_mapping(configure(*SETTINGS, f"run.root={root}", "run.name=run", *overrides))
    runtime = Runtime(config, DistEnv())
    run(config, runtime, {})
    runtime.close()
    return read_result(root / "run")


def test_a_run_stops_early_and_its_patience_survives_a_resume(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    part = train(tmp_path, "trainer.patience=2", "trainer.max_steps=4")
    assert (part["status"], part["step"], part.get("stopped_early")) == ("complete", 4, None)
    result = train(tmp_path, "trainer.patience=2")
    assert (result["status"], result["step"], result["stopped_early"]) == ("complete", 6, True)
    assert "stopped early at step 6: trainer.patience=2 evaluations" in caplog.text
    caplog.clear()
    again = train(tmp_path, "trainer.patience=2")
    assert all(again[key] == result[key] for key in ("status", "step", "stopped_early", "val_loss", "best_val_loss"))
    assert "stopped early" not in caplog.text, "nothing is trained or evaluated again"
    further = train(tmp_path, "trainer.patience=3")
    assert (further["step"], further["stopped_early"]) == (8, True)
    last = train(tmp_path)
    assert (last["status"], last["step"], last.get("stopped_early")) == ("complete", 12, None)


def test_patience_counts_evaluations_without_a_loss_lower_by_min_delta():
    state, counts = TrainState(), []
    for step, loss in enumerate([3.0, 2.5, 2.45, 2.41, 2.3, 2.6], start=1):
        state.step = state.val_step = step
        state.val_loss = loss
        count_patience(state, min_delta=0.1)
        counts.append(state.evaluations_above)
    assert counts == [0, 0, 1, 2, 0, 1]  # 2.41 is above 2.5 - 0.1
    assert not has_stopped_early(state, None)
    assert not has_stopped_early(state, 2)
    assert has_stopped_early(state, 1)
    state.step += 1  # has trained on, with a larger patience
    assert not has_stopped_early(state, 1)


def test_patience_needs_evaluations():
    with pytest.raises(ConfigError, match=r"trainer.patience=2 needs evaluations .* set trainer.eval_every"):
        configure("trainer.patience=2", "trainer.eval_every=null")


def test_milestones_are_saved_and_kept(tmp_path):
    """Also if no other snapshot is due at their steps."""
    train(tmp_path, "snapshot.keep_every=5", "snapshot.keep_last=1", "snapshot.keep_best=false")
    kept = sorted(path.name for path in (tmp_path / "run" / "snapshots").glob("step_*"))
    assert kept == ["step_00000005", "step_00000010", "step_00000012"]
