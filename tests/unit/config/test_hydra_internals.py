"""Hydra on a Python whose argparse checks help texts, as 3.14's does."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest
from hydra._internal import utils

from mingpt_ddp.config.compose.hydra_utils import run_hydra

pytestmark = pytest.mark.core


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the help of each argument as Python 3.14 does, on every Python."""
    add_argument = argparse.ArgumentParser.add_argument

    def check_help(self: argparse.ArgumentParser, action: argparse.Action) -> None:
        try:
            "%" in action.help  # type: ignore[operator]  # noqa: B015
        except TypeError as error:
            raise ValueError("badly formed help string") from error

    def add_checked(self: Any, *names: str, **options: Any) -> argparse.Action:
        action = add_argument(self, *names, **options)
        self._check_help(action)
        return action

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_checked)


def test_a_command_composes_and_others_keep_the_check(checked, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "data.block_size=7"])
    composed = []
    assert run_hydra(composed.append) == ""
    assert composed[0].data.block_size == 7
    assert utils.argparse is argparse
    with pytest.raises(ValueError, match="badly formed"):
        argparse.ArgumentParser().add_argument("--x", help=object())  # type: ignore[arg-type]


def test_the_check_is_back_after_an_error(checked, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py"])
    seen = []

    def fail(cfg):
        seen.append(utils.argparse is argparse)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_hydra(fail)
    assert (seen, utils.argparse) == ([False], argparse)
