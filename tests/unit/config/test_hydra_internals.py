"""Hydra works with an argparse that checks help texts, like that of Python 3.14."""

from __future__ import annotations

import sys

from launching import ROOT, call

# Checks the help text of each argument as Python 3.14 does, on every Python version.
CHECK = """
import argparse
add_argument = argparse.ArgumentParser.add_argument

def check_help(self, action):
    try:
        "%" in action.help
    except TypeError as error:
        raise ValueError("badly formed help string") from error

def add_checked(self, *names, **options):
    action = add_argument(self, *names, **options)
    self._check_help(action)
    return action

argparse.ArgumentParser._check_help = check_help
argparse.ArgumentParser.add_argument = add_checked
"""


def test_a_command_composes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CHECK)
    # The option -W keeps the test from forking the command off a process without the check.
    command = [sys.executable, "-W", "ignore", str(ROOT / "main.py"), "data.block_size=7"]
    done = call([*command, "--cfg", "job"], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "block_size: 7\n" in done.stdout
