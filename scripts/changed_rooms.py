"""Print the folders and files of tests/unit to run for what has changed: `make check`.

Changed is what differs from the commit where this branch left origin/main, or main: commits, the
working tree, new files. The tests of a room, a folder or module of the package, run if it has
changed or any room that it imports, also through others; without git, and after a change of what
many tests depend on (a preset, a helper of tests, setup.cfg), all unit tests.
"""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mingpt_ddp"
TESTS = Path("tests/unit")


def git(*words: str) -> list[str] | None:
    """Return the lines that git prints, or None if it fails or is not there."""
    if shutil.which("git"):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return None if done.returncode else done.stdout.splitlines()
    return None


def changed_files() -> list[str] | None:
    """Return the paths that have changed, or None if git cannot tell."""
    if base := git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main"):
        new = git("ls-files", "--others", "--exclude-standard")
        return [*(git("diff", "--name-only", "--no-renames", base[0]) or []), *(new or [])]
    return None


@functools.cache
def imports(room: Path) -> set[str]:
    """Return the rooms that the modules of a room import, also in functions."""
    found = set()
    for path in room.rglob("*.py") if room.is_dir() else [room]:
        tree = ast.parse("" if path.name == "__main__.py" else path.read_text())  # a command: cli
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith(f"{PACKAGE}.")}


def with_importers(rooms: set[str]) -> set[str]:
    """Return the rooms, those that import them, those that import these, and so on."""
    places = [*(ROOT / PACKAGE).iterdir(), ROOT / "benchmarks"]
    imported = {path.stem: imports(path) for path in places if rooms}
    while more := {name for name, below in imported.items() if below & rooms} - rooms:
        rooms = rooms | more
    return rooms


def tests_of(changed: Iterable[str]) -> list[Path]:
    """Return the folders and files of tests for changed paths, none for none."""
    found, rooms = set(), set()
    for path in map(Path, changed):
        if path.is_relative_to(TESTS) and path.parent != TESTS:
            found.add(TESTS / path.parts[2])
        elif path.parts[0] in (PACKAGE, "benchmarks"):
            rooms.add(path.parts[1 if path.parts[0] == PACKAGE else 0].removesuffix(".py"))
        elif path.suffix != ".md" and not path.name.startswith("test_"):
            return [TESTS]
        found.update(file.relative_to(ROOT) for file in (ROOT / TESTS).glob("test_*.py"))
    for room in with_importers(rooms):
        # those of a command's module, as mingpt_ddp/sample.py, stand in cli/
        found.add(TESTS / room if (ROOT / TESTS / room).is_dir() else TESTS / "cli")
    return sorted(path for path in found if (ROOT / path).exists())


if __name__ == "__main__":
    changed = changed_files()
    print(*([TESTS] if changed is None else tests_of(changed)))
