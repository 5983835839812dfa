"""Check the commands of examples/digits and examples/toy, and the script notify.sbatch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from example_files import EXAMPLES, command_of, run_in_shell
from runs import read_result


def test_toy(tmp_path):
    command = command_of(EXAMPLES / "toy" / "toy.py")
    done = run_in_shell(f"{command} run.name=run", tmp_path)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) < 24, "more than a screen"
    assert read_result(tmp_path / "outputs" / "run")["val_loss"] < 0.1


def test_digits(tmp_path):
    """Train a seventh of the steps. tests/e2e/test_tasks.py trains all of them."""
    pytest.importorskip("sklearn")
    command = command_of(EXAMPLES / "digits" / "digits.py")
    done = run_in_shell(f"{command} trainer.max_steps=60 run.name=run", tmp_path)
    assert done.returncode == 0, done.stdout
    assert read_result(tmp_path / "outputs" / "run")["test_accuracy"] > 0.8


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("complete", 0, ["notified"]), ("preempted", 0, ["requeue 7"]), ("complete", 3, [])],
)
def test_a_command_after_a_complete_run(status, code, expected, tmp_path):
    """Run the command in a SLURM job whose programs are replaced."""
    result = json.dumps({"status": status})
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    programs = {
        "srun": f"echo '{result}' > outputs/run/result.json; exit {code}",
        "scontrol": 'echo "$@" >> seen.txt',
    }
    for name, line in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (tmp_path / "seen.txt").touch()
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(EXAMPLES / "notify.sbatch"), "run", "echo notified >> seen.txt"]
    environ = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True)
    assert done.returncode == code
    assert (tmp_path / "seen.txt").read_text().splitlines() == expected
