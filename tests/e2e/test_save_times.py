"""Check which steps are saved with snapshot.every_epochs and snapshot.every_minutes."""

from __future__ import annotations

from pathlib import Path

from launching import TINY, committed, python_main
from runs import read_result, succeed

SETTINGS = [
    *TINY,
    "snapshot.every_steps=null",
    "snapshot.keep_last=1000",
    "snapshot.keep_best=false",
    "run.name=run",
    "trainer.eval_every=null",
    "trainer.max_steps=null",
]


def saved(cwd: Path, *overrides: str) -> list[int]:
    succeed([*python_main(), *SETTINGS, *overrides], cwd)
    return committed(cwd / "outputs" / "run")


def test_every_epochs(tmp_path):
    """An epoch of 8,371 characters has 522 windows of 16 characters, which is 43 steps of 12."""
    assert saved(tmp_path, "trainer.max_epochs=5", "snapshot.every_epochs=2") == [86, 172, 215]


def test_every_minutes(tmp_path):
    """Saves follow the clock of rank zero, and do not come more often."""
    steps = saved(tmp_path, "trainer.max_steps=400", "snapshot.every_minutes=0.005")  # 0.3 s
    seconds = read_result(tmp_path / "outputs" / "run")["wall_seconds"]
    assert 2 <= len(steps) <= seconds / 0.3 + 1 and steps[-1] == 400
