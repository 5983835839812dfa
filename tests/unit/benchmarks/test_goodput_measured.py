"""Measured goodput is relative to undisturbed steps, which are read from the log of a run.

A step is undisturbed if no save is in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from benchmarking import modules


@pytest.fixture(scope="module")
def goodput() -> Iterator[ModuleType]:
    for loaded in modules("goodput_measured"):
        yield loaded.goodput_measured


def log_of(*events: tuple[float, str]) -> str:
    """Return a log. The time of each event is in seconds after the full minute."""
    lines = [f"2026-01-01 00:00:{time:06.3f} INFO {text}" for time, text in events]
    return "\n".join(line.replace(".", ",", 1) for line in lines)


def steps(first: int, count: int, since: float, step_s: float) -> list[tuple[float, str]]:
    return [(since + i * step_s, f"step {first + i}/99: loss 1.0") for i in range(count)]


def test_steps_during_a_save_and_the_first_steps_do_not_count(goodput):
    text = log_of(
        (0.0, "run outputs/a"),
        *steps(1, 30, 1.0, 0.1),  # ends at 3.9 s
        (3.95, "the next snapshot is due in 9.0 s"),
        *steps(31, 2, 4.5, 0.5),
        (5.1, "snapshot of step 30 committed to outputs/a/snapshots"),
        *steps(33, 2, 5.2, 0.2),  # the first one began during the save
        (5.5, "run outputs/a"),  # this attempt is killed before it resumes
        (6.0, "run outputs/a"),
        (6.1, "resuming from the snapshot of step 30 of 99"),
        *steps(31, 22, 7.0, 0.4),
    )
    first, second = goodput.read_attempts(text)
    assert (first.resumed, first.step, second.resumed, second.step) == (0, 34, 30, 52)
    assert first.quiet_s == pytest.approx([0.1] * 10 + [0.2])
    assert second.quiet_s == pytest.approx([0.4] * 2)
    kept = 30 * sum(first.quiet_s) / 11 + 22 * 0.4
    assert goodput.undisturbed_s([first, second]) == pytest.approx(kept)


def test_a_short_attempt_is_assumed_to_run_at_the_pace_of_a_long_one(goodput):
    long = goodput.Attempt(resumed=0, step=50, quiet_s=[0.5])
    short = goodput.Attempt(resumed=40, step=45)
    assert goodput.undisturbed_s([long, short]) == 22.5
    assert (
        goodput.undisturbed_s([short, goodput.Attempt(resumed=43, step=50, quiet_s=[0.5])]) == 5.0
    )
    with pytest.raises(SystemExit, match="too short"):
        goodput.undisturbed_s([short])


def test_the_first_start_is_not_a_restart(goodput):
    starts = ["processes 3.0 s, first step 0.2 s", "processes 0.1 s, first step 0.2 s"]
    starts.append("processes 0.3 s, first step 0.4 s")
    label = "the stages of this start took"
    text = log_of(*((float(i), f"{label}: {start}") for i, start in enumerate(starts)))
    assert goodput.restart_stages(text) == {"processes": 0.2, "first step": 0.3}
