"""How many functions, in how many files, a reader passes from a script to `loss.backward()`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from one_process import reset

ROOT = Path(__file__).resolve().parents[3]
TINY = {"n_layer": 1, "n_head": 1, "n_embd": 8}


class ReachedError(BaseException):
    """The script has come to its first backward pass: no handler of an Exception takes this."""


@pytest.fixture(autouse=True)
def _undone(monkeypatch, tmp_path):
    """Undo what a command changes in its process."""
    environ = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield
    reset(environ)


def path_to_backward(monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]) -> list[str]:
    """Return the functions of this project that are on the stack, as file:name."""
    path = []

    def backward(self: torch.Tensor) -> NoReturn:
        for frame in traceback.extract_stack():
            file = Path(frame.filename)
            is_ours = file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests")
            if is_ours and ".venv" not in file.parts and frame.name != "<module>":
                path.append(f"{file.relative_to(ROOT)}:{frame.name}")
        raise ReachedError

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with pytest.raises(ReachedError):
        start()
    return path


def files(path: list[str]) -> set[str]:
    return {step.partition(":")[0] for step in path}


def test_from_main(monkeypatch):
    model = [f"model.{key}={value}" for key, value in TINY.items()]
    words = ["data=python_docs", "model=gpt_nano", *model, "trainer.max_steps=1"]
    monkeypatch.setattr(sys, "argv", ["main.py", *words, "trainer.device=cpu"])
    path = path_to_backward(
        monkeypatch, lambda: runpy.run_path(str(ROOT / "main.py"), run_name="__main__")
    )
    below_loop = path[path.index("mingpt_ddp/training/trainer.py:fit") + 1 :]
    assert below_loop == [
        "mingpt_ddp/training/trainer.py:_train",
        "mingpt_ddp/training/train_step.py:passes",
    ]
    assert len(path) <= 9, path
    assert len(files(path)) <= 6, path


def test_from_a_loop_of_ones_own(monkeypatch):
    example = runpy.run_path(str(ROOT / "examples" / "train.py"))
    settings = example["SETTINGS"]
    settings["model"] |= TINY
    settings["trainer"] |= {"max_steps": 1, "device": "cpu"}
    path = path_to_backward(monkeypatch, lambda: example["train"](settings))
    assert path == ["examples/train.py:train", "mingpt_ddp/training/train_step.py:passes"]
