"""Which unit tests `make check` runs, for changed files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import changed_rooms  # noqa: E402


def chosen(*changed: str) -> set[str]:
    """Return what is chosen below tests/unit, without the files there, which all changes choose."""
    paths = changed_rooms.tests_of(changed)
    return {path.name for path in paths if path.suffix != ".py"}


def test_a_room_and_those_that_import_it():
    assert chosen("mingpt_ddp/cli/notify.py") == {"cli", "benchmarks"}
    assert chosen("mingpt_ddp/optim/muon.py") >= {"optim", "training", "cli"}
    assert not chosen("mingpt_ddp/optim/muon.py") & {"config", "data", "storage"}
    assert chosen("mingpt_ddp/errors.py") >= {"config", "models", "training", "cli", "benchmarks"}


def test_importers_of_importers(monkeypatch, tmp_path):
    monkeypatch.setattr(changed_rooms, "ROOT", tmp_path)
    (tmp_path / "mingpt_ddp").mkdir()
    (tmp_path / "benchmarks").mkdir()
    for room, below in (("a", "b"), ("b", "c"), ("c", "c"), ("d", "a"), ("e", "d")):
        text = f"from mingpt_ddp.{below} import x"
        (tmp_path / "mingpt_ddp" / f"{room}.py").write_text(text)
    assert changed_rooms.with_importers({"c"}) == {*"abcde"}
    assert changed_rooms.with_importers({"a"}) == {*"ade"}
    assert changed_rooms.with_importers(set()) == set()


def test_all_forms_of_an_import(tmp_path):
    (tmp_path / "a.py").write_text(
        "import torch, mingpt_ddp.data.rng\nfrom mingpt_ddp import errors\n"
        "from .x import y\ndef f():\n    from mingpt_ddp.optim.muon import Muon\n"
    )
    assert changed_rooms.imports(tmp_path) == {"data", "errors", "optim"}
    assert changed_rooms.imports(tmp_path / "a.py") == {"data", "errors", "optim"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("mingpt_ddp/plan.py", {"cli"}),  # the module of a command
        ("mingpt_ddp/deleted_room/a.py", {"cli"}),
        ("tests/unit/optim/test_muon.py", {"optim"}),
        ("benchmarks/fits.py", {"benchmarks"}),
        ("docs/logs.md", set()),
        ("tests/e2e/test_kill.py", set()),
        ("tests/contract/test_run.py", set()),
        ("tests/unit/test_layers.py", set()),
        ("tests/launching.py", {"unit"}),
        ("conf/config.yaml", {"unit"}),
    ],
)
def test_other_files(changed, expected):
    assert chosen(changed) == expected


def test_files_of_no_room_run_after_any_change():
    assert Path("tests/unit/test_promises.py") in changed_rooms.tests_of(["docs/logs.md"])
    assert changed_rooms.tests_of([]) == []


def test_git(tmp_path, monkeypatch):
    """Commits since main, the working tree, and new files; nothing without a commit of main."""
    monkeypatch.setattr(changed_rooms, "ROOT", tmp_path)
    assert changed_rooms.changed_files() is None
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-b", "main"], [*who, "commit", "--allow-empty", "-m", "first"]):
        assert changed_rooms.git(*words) is not None
    assert changed_rooms.changed_files() == []
    for name in ("committed", "staged", "new"):
        (tmp_path / name).write_text(name)
    changed_rooms.git("checkout", "-b", "branch")
    changed_rooms.git("add", "committed")
    changed_rooms.git(*who, "commit", "-m", "second")
    changed_rooms.git("add", "staged")
    assert sorted(changed_rooms.changed_files()) == ["committed", "new", "staged"]
    changed_rooms.git("branch", "-m", "main", "other")
    assert changed_rooms.changed_files() is None


def test_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert changed_rooms.changed_files() is None
