"""trainer.max_minutes: kills before and after it becomes a number of steps, on other ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from holding import kill_before
from launching import TINY, committed, python_main, torchrun
from runs import succeed
from snapshot_helpers import digests

FIXED_AT = 20
END = 40  # the steps that minutes at the last resume are
SETTINGS = [
    *[word for word in TINY if not word.startswith(("trainer.max_", "optimizer.warmup"))],
    f"optimizer.warmup_steps={FIXED_AT}",
    "trainer.micro_batch_size=2",
    "snapshot.every_steps=5",
    "ddp.reduction=canonical",
    "run.name=run",
]


def state_of(run: Path) -> dict[str, Any]:
    return json.loads(max(run.glob("snapshots/*/state.json")).read_text())


def test_killed_before_and_after_the_number_of_steps_is_fixed(tmp_path):
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    run = killed / "outputs" / "run"
    hour = [*torchrun(2), *SETTINGS, "trainer.max_minutes=60"]
    kill_before(13, hour, killed, lambda: 10 in committed(run))
    assert state_of(run)["train_state"]["step_seconds"] is None
    kill_before(28, hour, killed, lambda: 25 in committed(run))
    state = state_of(run)
    assert state["train_state"]["timed_steps"] == 25 - 2 * 2, "the two attempts together"
    steps = 60 * 60 / state["train_state"]["step_seconds"]
    assert state["steps"] == round(steps) > END

    shutil.copytree(killed, undisturbed)
    minutes = f"trainer.max_minutes={60 * END / state['steps']!r}"  # a part of the recorded number
    kill_before(33, [*torchrun(3), *SETTINGS, minutes], killed, lambda: 30 in committed(run))
    text = succeed([*torchrun(2), *SETTINGS, minutes], killed)
    assert f"resuming from the snapshot of step 30 of {END}" in text
    assert f"{END} steps took " in text
    succeed([*python_main(), *SETTINGS, minutes], undisturbed)
    assert max(committed(run)) == END
    assert digests(run) == digests(undisturbed / "outputs" / "run")
