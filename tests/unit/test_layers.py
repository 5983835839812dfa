"""Rules for the code of the package, checked on its syntax trees.

Imports lead only to lower layers. Only distributed/ and process/ ask for the rank. There is one
training step. Everything that docs/architecture.md names exists.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from count_lines import code_lines, code_tokens  # noqa: E402
from import_map import flowchart  # noqa: E402

PACKAGE = ROOT / "mingpt_ddp"
MODULES = sorted(PACKAGE.rglob("*.py"))
# The layers from top to bottom. A layer imports itself and lower layers, never a higher layer.
ROOMS = (
    "loop",
    "parts",
    "cli",
    "study",
    "training",
    "snapshots",
    "metrics",
    "tasks",
    "inference",
    "distributed",
    "optim",
    "data",
    "models",
    "storage",
    "process",
    "config",
    "torch_internals",
    "errors",
)
# Modules that users name, with `python -m mingpt_ddp...` or in code. They may import any layer.
DOORS = (
    "__init__.py",
    "__main__.py",
    "again.py",
    "evaluate.py",
    "plan.py",
    "registry.py",
    "report.py",
    "sample.py",
    "snapshots/__main__.py",
    "versions.py",
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the package that this module imports.

    This includes imports in functions and for type checking.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "mingpt_ddp"
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mingpt_ddp":
            below = str(node.module).partition(".")[2]
            yield from (
                [below] if below else [a.name for a in node.names if a.name != "__version__"]
            )


def test_imports_lead_only_to_lower_layers():
    wrong = []
    for path in MODULES:
        if name_of(path) in DOORS:
            continue
        own = ROOMS.index(name_of(path).removesuffix(".py").split("/")[0])
        for name in imported(tree_of(path)):
            if ROOMS.index(name.split(".")[0]) < own:
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong


def dotted_name(path: Path) -> str:
    """Return the dotted name of a module, relative to the package."""
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.Module, names: set[str]) -> set[str]:
    """Return the modules among these names that a module imports, including in functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mingpt_ddp."):
            below = str(node.module).partition(".")[2]
            full = {f"{below}.{alias.name}" for alias in node.names}
            found |= (full & names) or {below}
    return found & names


def test_results_import_no_torch():
    """Its modules never import torch, not even in functions. Nor do the modules that they load."""
    paths = {dotted_name(path): path for path in MODULES}
    left = [name for name in paths if name.startswith("study.results")]
    seen = {*left}
    while left:
        name = left.pop()
        tree = tree_of(paths[name])
        nodes = ast.walk(tree) if name.startswith("study.results") else tree.body
        import_nodes = ast.Module(
            [n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))], []
        )
        for node in import_nodes.body:
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert not any(str(each).split(".")[0] == "torch" for each in named), name
        new = imported_modules(import_nodes, {*paths}) - seen
        seen |= new
        left += new


def folder_of(path: Path) -> str:
    """Return the folder of a module within its room, or its name if it is directly in the room."""
    parts = name_of(path).removesuffix(".py").split("/")
    return "/".join(parts[:2])


@pytest.mark.parametrize("unit", [dotted_name, folder_of])
def test_no_import_cycle(unit):
    names = {dotted_name(p): p for p in MODULES}
    edges: dict[str, set[str]] = {}
    for path in names.values():
        found = imported_modules(tree_of(path), {*names})
        own = edges.setdefault(unit(path), set())
        own |= {unit(names[each]) for each in found} - {unit(path)}
    while edges:
        leaves = [name for name, targets in edges.items() if not targets & edges.keys()]
        assert leaves, f"a cycle among {sorted(edges)}"
        for name in leaves:
            del edges[name]


def test_top_of_the_package():
    top = {
        p.name.removesuffix(".py")
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    doors = {door.removesuffix(".py") for door in DOORS if "/" not in door}
    assert top - doors == {*ROOMS, "conf"}  # conf has the presets; in a checkout it is a link


def test_how_code_is_counted():
    """An f-string is one token, even on Python versions that split it."""
    source = (
        '"""A docstring."""\n\n# comment\nx = f"{y!r:>{width}} and {f(1)}"\nif x:\n    '
        "pass  # more\n"
    )
    assert (code_tokens(source), code_lines(source)) == (7, 3)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    yield from (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef))


def calls(function: ast.FunctionDef, name: str) -> bool:
    """Return True if a function calls a method itself, and not in a nested function."""
    attributes = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
    return any(isinstance(n, ast.Attribute) and n.attr == name for n in attributes)


def test_there_is_one_training_step():
    """Besides the step, only the warm-up and the diagnosis of anomalies run a backward pass."""
    found = {}
    for path in MODULES:
        for function in functions(path):
            if calls(function, "backward"):
                found[f"{name_of(path)}:{function.name}"] = function
    assert found.keys() == {
        "training/train_step.py:passes",
        "training/train_step.py:diagnose",
        "distributed/strategies/base.py:warm_up",
    }
    (loop,) = [f for f in functions(PACKAGE / "training/trainer.py") if f.name == "_train"]
    for part in ("passes", "clip", "find_in_step", "discard", "update"):
        assert calls(loop, part), part


def name_in(node: ast.AST) -> str:
    """Return the name of a variable or an attribute, or ""."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_rank(node: ast.expr) -> bool:
    return name_in(node) in ("rank", "local_rank", "RANK", "LOCAL_RANK")


def test_rank_conditions():
    """Outside distributed/ and process/, no code asks if a rank is rank zero."""
    wrong = []
    for path in MODULES:
        if name_of(path).startswith(("distributed/", "process/")):
            continue
        for node in ast.walk(tree_of(path)):
            asked = name_in(node) in ("is_rank_zero", "is_main")
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                zero = any(isinstance(n, ast.Constant) and n.value == 0 for n in ast.walk(node))
                asked = asked or (zero and any(map(is_rank, sides)))
            if asked:
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong


def test_the_picture_is_current():
    text = (ROOT / "docs/architecture.md").read_text()
    assert flowchart() in text, "run python scripts/import_map.py"


def test_everything_that_the_architecture_page_names_exists():
    """It names paths, folders, classes, functions and keys."""
    text = (ROOT / "docs/architecture.md").read_text()
    source = "\n".join(path.read_text() for path in MODULES)
    modules = {path.name for path in MODULES}
    folders = {f"{path.parent.name}/" for path in MODULES}
    for path in re.findall(r"[\w./]*\w\.py\b|(?<=`)[\w/]+/(?=`)", text):
        known = (
            (ROOT / path).exists() or (PACKAGE / path).exists() or (ROOT / "docs" / path).exists()
        )
        assert known or path in modules | folders, path
    for name in re.findall(r"`(\w+(?:\.(?!py\b|json\b)\w+)?)`", text):
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b|^ +{part}: ", source, re.M), name
