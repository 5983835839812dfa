"""The layers of the package: every import runs down, from the commands to the errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mingpt_ddp"
MODULES = sorted(PACKAGE.rglob("*.py"))
# From the top down: a room imports itself and rooms further down, never one further up.
ROOMS = (
    *("cli", "sweeps", "training", "snapshots", "metrics", "inference", "distributed", "optim", "data", "models"),
    *("storage", "config", "torch_internals", "errors"),
)
# What `python -m mingpt_ddp...` and users' own Python files name: a few lines that import the room behind.
DOORS = ("__init__.py", "__main__.py", "registry.py", "report.py", "sample.py", "snapshots/__main__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names below the package that a module imports, inside of functions and for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "mingpt_ddp")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mingpt_ddp":
            below = str(node.module).partition(".")[2]
            yield from ([below] if below else [a.name for a in node.names if a.name != "__version__"])


@every_module
def test_imports_run_down(path):
    if name_of(path) in DOORS:
        return
    own = name_of(path).removesuffix(".py").split("/")[0]
    wrong = [name for name in imported(tree_of(path)) if ROOMS.index(name.split(".")[0]) < ROOMS.index(own)]
    assert not wrong, f"{own} may not import {wrong}"


def test_no_import_cycle():
    names = {name_of(p).removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in MODULES}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        edges[name] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mingpt_ddp."):
                below = str(node.module).partition(".")[2]
                full = {f"{below}.{a.name}" if f"{below}.{a.name}" in names else below for a in node.names}
                edges[name] |= {target for target in full if target in names} - {name}
    while edges:
        leaves = [name for name, targets in edges.items() if not targets & edges.keys()]
        assert leaves, f"a cycle among {sorted(edges)}"
        for name in leaves:
            del edges[name]


def test_top_of_the_package():
    top = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    doors = {door.removesuffix(".py") for door in DOORS if "/" not in door}
    assert top - doors == set(ROOMS)
