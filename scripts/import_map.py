"""Draw which folders of the package import which, in docs/architecture.md: `python scripts/import_map.py`.

An arrow that other arrows imply is left out. So are the modules beside the folders, such as errors.py, which everything
imports.
"""  # noqa: E501

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mingpt_ddp"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"```mermaid\nflowchart TD\n  %% imports\n.*?```", re.DOTALL)


def imports() -> dict[str, set[str]]:
    """Return the folders that each folder imports, including imports in functions."""
    folders = {
        path.name
        for path in PACKAGE.iterdir()
        if (path / "__init__.py").exists() and not path.is_symlink()
    }
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    package, *rest = node.module.split(".")
                    if package == "mingpt_ddp" and rest and rest[0] in folders - {folder}:
                        found[folder].add(rest[0])
    return found


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return all folders that a folder imports, directly or through other folders."""
    to_visit, seen = [start], set[str]()
    while to_visit:
        new = graph[to_visit.pop()] - seen
        seen |= new
        to_visit += new
    return seen


def flowchart() -> str:
    """Return the picture as a block of Mermaid."""
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
