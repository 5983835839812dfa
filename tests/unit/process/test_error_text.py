"""The line that describes an error: its message, its place in the code, and the step.

Also which errors are equal, and which may pass if the run is restarted.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mingpt_ddp.optim.lr_schedule import get_lr
from mingpt_ddp.process.error_text import describe_error, is_transient, without_addresses

HERE = "tests/unit/process/test_error_text.py"


class Broken(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError("a\nlabel")


def caught(work) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_the_innermost_line_of_the_user_is_named():
    error = caught(lambda: nn.Linear(2, 2)(torch.zeros(3)))  # the line
    text = describe_error(error, "in the forward pass of step 9")
    # torch 2.15 puts the name of the operation first.
    assert text.startswith(
        ("RuntimeError: mat1 and mat2 shapes", "RuntimeError: addmm: mat1 and mat2 shapes")
    )
    assert text.endswith(f" ({HERE}:{line_of('# the line')}), in the forward pass of step 9")
    assert "\n" not in text


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_loader_process_names_its_line(workers):
    error = caught(lambda: list(DataLoader(Broken(), num_workers=workers)))
    text = describe_error(error)
    assert text == f"KeyError: 'a\\nlabel' ({HERE}:{line_of('raise KeyError(')})"
    assert not is_transient(error)


def test_an_error_outside_user_code_names_a_line_of_the_package():
    error = caught(lambda: get_lr(None, None, None))
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # drops the frames of this file
    assert re.search(r" \(mingpt_ddp/optim/lr_schedule.py:\d+\)$", describe_error(error))


def test_addresses_do_not_distinguish_errors():
    assert without_addresses(f"boom in {object()}") == without_addresses(f"boom in {object()}")
    assert without_addresses(f"no {id(object())}") == "no "
    assert without_addresses("at step 9, of 1073741824 bytes") == "at step 9, of 1073741824 bytes"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("boom"), False),
        (FileNotFoundError("a.png"), False),
        (ConnectionResetError("reset"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("a DataLoader worker was killed while it passed a batch on"), True),
    ],
)
def test_errors_of_the_machine_are_transient(error, expected):
    assert is_transient(error) is expected
