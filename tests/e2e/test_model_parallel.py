"""Check examples/model_parallel.py with the command in its docstring, on two ranks and a CPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from example_files import EXAMPLES, command_of, run_in_shell
from example_model import EXAMPLE
from launching import call, python_main
from runs import read_result


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_forked(cwd: Path, *more: str) -> CompletedProcess[str]:
    """Run the command with more words. It is forked, which saves the import of torch."""
    words = [word for word in shlex.split(command_of(EXAMPLE))[2:] if "config-dir" not in word]
    return call([*python_main(), f"--config-dir={EXAMPLES}", *words, *more], cwd)


def test_the_command_of_the_example(tmp_path):
    """The run then continues with more steps."""
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    assert "on 2 x cpu" in done.stdout
    (run,) = (tmp_path / "outputs").iterdir()
    result = read_result(run)
    assert (result["status"], result["step"], result["world_size"]) == ("complete", 20, 2)
    done = run_forked(tmp_path, "trainer.max_steps=24")
    assert done.returncode == 0, done.stdout
    assert "resuming from the snapshot of step 20 " in done.stdout
    assert read_result(run)["step"] == 24


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (
            "ddp.strategy=zero1",
            "ModelParallel can use several devices per rank (to_devices), which needs "
            "ddp.strategy=ddp and ddp.reduction=fast; set both, or remove to_devices",
        ),
        ("model.n_head=3", "model.n_head=3 must divide model.n_embd=64"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(word, reason, tmp_path):
    done = run_forked(tmp_path, word)
    assert done.returncode == 2, done.stdout
    assert done.stdout.splitlines() == [f"config error: {reason}"]
    assert not (tmp_path / "outputs").exists()
