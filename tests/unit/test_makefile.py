"""How `make` installs the project. The real Makefile runs with a stand-in for .venv's Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
echo "$@" >>calls
if [ -e broken ]; then echo 'ERROR: no space left' >&2; exit 1; fi
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a folder with the Makefile and an environment.

    Its Python writes its arguments to the file `calls`, and fails if there is a file `broken`.
    """
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in ("Makefile", "setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "pip").touch()
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    return tmp_path


def make(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make as a user whose environment forbids writing compiled modules."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))
    }
    user = {**kept, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(["make", *words], cwd=checkout, env=user, capture_output=True, text=True)


@pytest.mark.parametrize(("stamp", "what"), [(".train", "."), (".test", ".[test]")])
def test_pip_installs_once_and_leaves_compiling_to_the_imports(checkout, stamp, what):
    for _ in range(2):
        assert make(checkout, f".venv/{stamp}").returncode == 0
    (call,) = (checkout / "calls").read_text().splitlines()
    assert call.startswith("-m pip install ")
    assert "--no-compile" in call.split()
    assert call.endswith(f" -c constraints.txt -e {what}")


def test_imports_in_a_target_keep_their_compiled_modules(checkout):
    recipe = 'probe: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"'
    assert make(checkout, "--eval", recipe, "probe").stdout == "[]\n"


def test_a_failed_installation_is_seen_and_tried_again(checkout):
    (checkout / "broken").touch()
    failed = make(checkout, ".venv/.train")
    assert failed.returncode == 2
    assert "ERROR: no space left" in failed.stderr
    (checkout / "broken").unlink()
    assert make(checkout, ".venv/.train").returncode == 0


def test_train_suggests_its_own_recipe_for_the_users_text(checkout):
    """Another recipe would reach a higher loss. Another run.name would be another directory."""
    suggested = make(checkout, "train").stdout
    trained = (checkout / "calls").read_text().splitlines()[-1]
    command = next(line for line in suggested.splitlines() if "data.path=my.txt" in line)
    assert trained.split()[:3] == ["main.py", "experiment=demo", "ddp.nproc_per_node=2"]
    assert {*trained.split()} <= {*command.split()}
    assert "run.name=mine" in command
