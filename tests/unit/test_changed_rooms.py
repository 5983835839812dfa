"""The script that selects the unit tests of `make check` for changed files, in a small project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "changed_rooms.py"
# Module d imports a, b and c in different forms. The module of a command counts as `cli`.
FILES = {
    "mingpt_ddp/a.py": "from mingpt_ddp.b import x",
    "mingpt_ddp/b/m.py": "import os, mingpt_ddp.c.n",
    "mingpt_ddp/b/__main__.py": "from mingpt_ddp.e import x",
    "mingpt_ddp/c/n.py": "from .x import y",
    "mingpt_ddp/d.py": "def f():\n    from mingpt_ddp import a\n",
    "mingpt_ddp/e.py": "",
    "benchmarks/f.py": "from mingpt_ddp.d import x",
    "tests/unit/test_files.py": "",
    "tests/e2e/test_x.py": "",
    "tests/launching.py": "",
    "docs/x.md": "",
    "conf/config.yaml": "",
    **{f"tests/unit/{room}/test_x.py": "" for room in ("a", "b", "c", "d", "cli", "benchmarks")},
}


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Create a checkout with one commit on the branch main."""
    tmp_path = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    git(tmp_path, "init", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def chosen(project: Path, **environment: str) -> list[str]:
    """Return the tests that the script selects, without tests/unit before each name."""
    command = [sys.executable, "scripts/changed_rooms.py"]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=project, env=env, check=True, capture_output=True, text=True)
    return [name.removeprefix("tests/unit/") for name in done.stdout.split()]


ALL = ["tests/unit"]


@pytest.fixture(autouse=True)
def unchanged(project):
    """Undo the changes of a test in the working tree."""
    yield
    git(project, "reset", "--hard", "main")
    git(project, "clean", "-fd")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("mingpt_ddp/c/n.py", ["a", "b", "benchmarks", "c", "d", "test_files.py"]),
        ("mingpt_ddp/d.py", ["benchmarks", "d", "test_files.py"]),
        ("mingpt_ddp/e.py", ["cli", "test_files.py"]),
        ("mingpt_ddp/deleted/x.py", ["cli", "test_files.py"]),
        ("benchmarks/f.py", ["benchmarks", "test_files.py"]),
        ("tests/unit/b/test_x.py", ["b", "test_files.py"]),
        ("tests/unit/test_files.py", ["test_files.py"]),
        ("tests/e2e/test_x.py", ["test_files.py"]),
        ("docs/x.md", ["test_files.py"]),
        ("tests/launching.py", ALL),
        ("conf/config.yaml", ALL),
    ],
)
def test_a_changed_room_and_the_rooms_that_import_it_are_tested(changed, expected, project):
    (project / changed).parent.mkdir(exist_ok=True)
    (project / changed).write_text("# changed")
    assert chosen(project) == expected


def test_commits_since_main_the_working_tree_and_new_files(project):
    """If git cannot tell, all tests are selected."""
    assert chosen(project) == []
    git(project, "checkout", "-b", "branch")
    for room, add in (("a", "commit"), ("b", "add"), ("c", "")):
        (project / f"tests/unit/{room}/test_new.py").touch()
        if add:
            git(project, "add", ".")
        if add == "commit":
            git(project, "commit", "-m", "second")
    assert chosen(project) == ["a", "b", "c", "test_files.py"]
    assert chosen(project, PATH="") == ALL
    git(project, "branch", "-m", "main", "other")
    assert chosen(project) == ALL
    git(project, "branch", "main", "other")
