"""Print the folders and files of tests/unit that a change affects. `make check` runs them.

Changes are all differences from the commit where this branch left origin/main, or main: commits,
edits in the working tree and new files. A room is a folder or module of the package. The tests of a
room run if the room has changed, or any room that it imports directly or through others. All unit
tests run without git, and after a change that many tests depend on (a preset, a helper of the
tests, setup.cfg).
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
    """Return the lines that a git command prints, or None if git fails or is not installed."""
    if shutil.which("git"):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return None if done.returncode else done.stdout.splitlines()
    return None


def changed_files() -> list[str] | None:
    """List the paths that have changed. Return None if git cannot tell."""
    if base := git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main"):
        new = git("ls-files", "--others", "--exclude-standard")
        return [*(git("diff", "--name-only", "--no-renames", base[0]) or []), *(new or [])]
    return None


@functools.cache
def imports(room: Path) -> set[str]:
    """Find the rooms that the modules of a room import, also inside functions."""
    found = set()
    for path in room.rglob("*.py") if room.is_dir() else [room]:
        # A __main__.py only starts a command. The tests of cli cover it.
        tree = ast.parse("" if path.name == "__main__.py" else path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith(f"{PACKAGE}.")}


def with_importers(rooms: set[str]) -> set[str]:
    """Add to these rooms all rooms that import any of them, directly or through others."""
    places = [*(ROOT / PACKAGE).iterdir(), ROOT / "benchmarks"]
    imported = {path.stem: imports(path) for path in places if rooms}
    while more := {name for name, below in imported.items() if below & rooms} - rooms:
        rooms = rooms | more
    return rooms


def tests_of(changed: Iterable[str]) -> list[Path]:
    """List the folders and files of tests that these changed paths affect."""
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
        # The tests of a command's module, such as mingpt_ddp/sample.py, are in cli/.
        found.add(TESTS / room if (ROOT / TESTS / room).is_dir() else TESTS / "cli")
    return sorted(path for path in found if (ROOT / path).exists())


if __name__ == "__main__":
    changed = changed_files()
    print(*([TESTS] if changed is None else tests_of(changed)))
