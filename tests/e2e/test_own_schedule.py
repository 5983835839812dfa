"""Check a learning rate schedule from a user's file, with gradients clipped by value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from holding import kill_before
from launching import TINY, call, committed, python_main
from runs import read_history, succeed, tool, weights

SCHEDULE = """
import math
from dataclasses import dataclass
from mingpt_ddp.registry import ScheduleConfig, register

calls = []

@dataclass(frozen=True)
class CyclicConfig(ScheduleConfig):
    period: int = 4

@register("schedule", "cyclic", CyclicConfig)
def cyclic(step, steps, config):
    calls.append(step)
    return {result}
"""
CYCLIC = "(1 + math.cos(2 * math.pi * step / config.period)) / 2 + step / steps / 10"
SETTINGS = [*TINY, "+optimizer.code=mine.py", "optimizer.schedule=cyclic", "run.name=run"]
PERIOD = "optimizer.schedule_settings={period: 6}"
TWO_RANKS = "ddp.nproc_per_node=2"


@pytest.fixture
def project(tmp_path) -> Path:
    write(tmp_path, CYCLIC)
    return tmp_path


def write(cwd: Path, result: str) -> None:
    (cwd / "conf").mkdir(exist_ok=True)
    (cwd / "conf" / "mine.py").write_text(SCHEDULE.replace("{result}", result))


def train(cwd: Path, *overrides: str) -> Any:
    return call([*python_main(), "--config-dir=conf", *SETTINGS, *overrides], cwd)


def test_the_rate_follows_the_schedule_even_after_a_kill(project):
    """Weight decay is in proportion to the rate, and the log shows the rate in effect."""
    more = [
        PERIOD,
        TWO_RANKS,
        "trainer.log_every=1",
        "optimizer.lr=0.5",
        "trainer.max_steps=40",
        "optimizer.weight_decay_schedule=lr",
        "trainer.grad_value_clip=0.01",
    ]
    done = train(project, *more)
    assert done.returncode == 0, done.stdout
    run = project / "outputs" / "run"
    rates = dict(read_history(run).series("lr"))
    assert rates[6] == pytest.approx(0.5 * (1 + 6 / 40 / 10))
    assert rates[3] == pytest.approx(0.5 * (3 / 40 / 10))
    command = [*python_main(), "--config-dir=conf", *SETTINGS, *more, "run.root=killed"]
    killed = project / "killed" / "run"
    kill_before(9, command, project, lambda: committed(killed), group="data")
    done = train(project, *more, "run.root=killed")
    assert done.returncode == 0, done.stdout
    assert weights(killed) == weights(run)
    recorded = yaml.safe_load((run / "config.yaml").read_text())["optimizer"]
    assert recorded["schedule_settings"] == {"period": 6}
    succeed(tool("evaluate", str(run)), project)


def test_a_run_continues_with_another_schedule(project):
    """The code of the first schedule is no longer needed."""
    done = train(project, PERIOD)
    assert done.returncode == 0, done.stdout
    words = [*TINY, "run.name=run", "optimizer.schedule=cosine", "trainer.max_steps=16"]
    text = succeed([*python_main(), *words], project)
    assert "resuming from the snapshot of step 12 " in text


@pytest.mark.parametrize(
    ("result", "overrides", "error"),
    [
        ("len(calls)", [], "the schedule cyclic: the rate of step 12 depends on more than"),
        (
            "-1.0",
            [],
            "the schedule cyclic must return a finite number of at least 0, but returned -",
        ),
        (
            "math.nan",
            [],
            "the schedule cyclic must return a finite number of at least 0, but returned nan",
        ),
        ("None", [], "the schedule cyclic must return a number, not None"),
        ("10**400", [], "the schedule cyclic must return a number, not 1000"),
        ("[][1]", [], "mine.py:15: IndexError"),
        (CYCLIC, ["optimizer.schedule_settings={periods: 6}"], "schedule_settings.periods is not"),
        (CYCLIC, ["optimizer.schedule_settings={period: x}"], "optimizer.schedule_settings.period"),
        (CYCLIC, ["optimizer.schedule=cyclik"], "must be one of .*; did you mean cyclic"),
        (CYCLIC, ["optimizer.schedule=wsd", PERIOD], "schedule_settings.period is not a key"),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_nothing_is_written(
    project, result, overrides, error
):
    write(project, result)
    done = train(project, *overrides)
    assert done.returncode == 2, done.stdout
    (line,) = done.stdout.splitlines()
    assert re.search(error, line), line
    assert not (project / "outputs").exists()
