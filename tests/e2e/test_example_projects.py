"""examples/digits and examples/toy: the commands in their first lines, as they stand there."""

from __future__ import annotations

import pytest
from example_files import EXAMPLES, command_of, run_in_shell

from mingpt_ddp.storage.run_directory import read_result


def test_toy(tmp_path):
    command = command_of(EXAMPLES / "toy" / "toy.py")
    done = run_in_shell(f"{command} run.name=run", tmp_path)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) < 24, "more than a screen"
    assert read_result(tmp_path / "outputs" / "run")["val_loss"] < 0.1


def test_digits(tmp_path):
    """A seventh of the steps; tests/e2e/test_tasks.py trains all."""
    pytest.importorskip("sklearn")
    command = command_of(EXAMPLES / "digits" / "digits.py")
    done = run_in_shell(f"{command} trainer.max_steps=60 run.name=run", tmp_path)
    assert done.returncode == 0, done.stdout
    assert read_result(tmp_path / "outputs" / "run")["test_accuracy"] > 0.8
