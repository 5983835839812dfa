"""Draw the imports between the folders of the package, as a picture in docs/architecture.md.

An arrow that other arrows imply is left out. Modules beside the folders are left out too, because
everything imports them, such as errors.py.

Usage: python scripts/import_map.py
"""

from __future__ import annotations

import re
from pathlib import Path

from changed_rooms import imports as imported_rooms

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mingpt_ddp"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"```mermaid\nflowchart TD\n  %% imports\n.*?```", re.DOTALL)


def imports() -> dict[str, set[str]]:
    """Find the folders that each folder imports, also inside functions."""
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    folders -= {path.name for path in PACKAGE.iterdir() if path.is_symlink()}
    return {name: imported_rooms(PACKAGE / name) & folders - {name} for name in folders}


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return all folders that a folder imports, directly or through other folders."""
    to_visit, seen = [start], set[str]()
    while to_visit:
        new = graph[to_visit.pop()] - seen
        seen |= new
        to_visit += new
    return seen


def flowchart() -> str:
    """Draw the picture as a Mermaid block."""
    graph = imports()
    lines = ["```mermaid", "flowchart TD", "  %% imports"]
    for folder in sorted(graph):
        implied = set[str]().union(*(reached(graph, other) for other in graph[folder]))
        lines += [f"  {folder} --> {other}" for other in sorted(graph[folder] - implied)]
    return "\n".join([*lines, "```"])


def main() -> None:
    """Replace the picture in the page."""
    PAGE.write_text(BLOCK.sub(lambda _: flowchart(), PAGE.read_text()))


if __name__ == "__main__":
    main()
