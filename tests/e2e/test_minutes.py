"""Check trainer.max_minutes under kills, before and after it becomes a number of steps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from holding import kill_before
from launching import TINY, committed, python_main, torchrun
from runs import fail, succeed, tool
from snapshot_helpers import digests

WARMUP = 5
END_STEP = 40  # number of steps that the minutes of the last resume allow
SETTINGS = [
    *[word for word in TINY if not word.startswith(("trainer.max_", "optimizer.warmup"))],
    f"optimizer.warmup_steps={WARMUP}",
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
    before = state_of(run)["train_state"]
    assert before["step_seconds"] is None
    # A tenth of this many minutes is over at about step 10, as soon as ten steps are timed.
    given = 100 * before["timed_seconds"] / before["timed_steps"] / 60
    few = [*torchrun(2), *SETTINGS, f"trainer.max_minutes={given!r}"]
    kill_before(28, few, killed, lambda: 25 in committed(run))
    state = state_of(run)
    assert state["train_state"]["timed_steps"] == 25 - 2 * 2, "the two attempts together"
    assert 10 < state["train_state"]["paced_at"] <= 25, "the rate has been held after the warm-up"
    steps = 60 * given / state["train_state"]["step_seconds"]
    assert state["steps"] == round(steps) > 28

    shutil.copytree(killed, undisturbed)
    minutes = f"trainer.max_minutes={given * END_STEP / state['steps']!r}"
    kill_before(33, [*torchrun(3), *SETTINGS, minutes], killed, lambda: 30 in committed(run))
    text = succeed([*torchrun(2), *SETTINGS, minutes], killed)
    assert f"resuming from the snapshot of step 30 of {END_STEP}" in text
    assert f"in {END_STEP} steps" in text
    succeed([*python_main(), *SETTINGS, minutes], undisturbed)
    assert max(committed(run)) == END_STEP
    assert digests(run) == digests(undisturbed / "outputs" / "run")


def test_a_replay_offers_only_steps_that_one_time_limit_has_trained(tmp_path):
    """Other minutes give another number of steps, so the learning rates before and after the
    change belong to different schedules.
    """
    first = 0
    for minutes in (0.02, 0.06):
        words = ["snapshot.keep_last=1000", f"trainer.max_minutes={minutes}"]
        succeed([*python_main(), *SETTINGS, *words], tmp_path)
        steps = state_of(tmp_path / "outputs" / "run")["train_state"]["step"]
        first = first or steps
    assert steps > first
    text = fail(tool("replay", "outputs/run", f"steps={steps}"), tmp_path)
    offers = [[*map(int, each)] for each in re.findall(r"steps=(\d+) \((\d+) to (\d+)\)", text)]
    assert offers
    for number, begin, end in offers:
        assert begin > first and number == end - begin + 1
    number, begin, end = max(offers)
    replayed = succeed(tool("replay", "outputs/run", f"steps={number}"), tmp_path)
    assert f"confirmed: steps {begin} to {end}," in replayed


def test_a_replay_of_a_constant_rate_needs_no_step_where_a_decay_begins(tmp_path):
    words = [*SETTINGS, "trainer.max_minutes=0.03", "optimizer.schedule=constant"]
    succeed([*python_main(), *words], tmp_path)
    steps = state_of(tmp_path / "outputs" / "run")["train_state"]["step"]
    replayed = succeed(tool("replay", "outputs/run", f"steps={steps}"), tmp_path)
    assert f"confirmed: steps 1 to {steps}" in replayed


def test_a_replay_knows_from_which_step_the_rate_has_decayed(tmp_path):
    text = succeed([*python_main(), *SETTINGS, "trainer.max_minutes=0.03"], tmp_path)
    run = tmp_path / "outputs" / "run"
    state = state_of(run)
    steps = state["train_state"]["step"]
    minutes = json.loads((run / "result.json").read_text())["minutes"]
    assert f"trained {minutes:.3g} minutes of trainer.max_minutes=0.03, in {steps} steps" in text
    assert WARMUP < state["train_state"]["paced_at"] < steps
    replayed = succeed(tool("replay", "outputs/run", f"steps={steps}"), tmp_path)
    assert f"confirmed: steps 1 to {steps}" in replayed
