"""Laws of the package, checked on its syntax trees: imports, sizes, vocabulary, rank conditions."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from count_lines import code_lines, code_tokens  # noqa: E402

PACKAGE = ROOT / "mingpt_ddp"
MODULES = sorted(PACKAGE.rglob("*.py"))
# From top to bottom: a layer imports itself and lower layers, never a higher one.
ROOMS = (
    *(
        "cli",
        "loop",
        "parts",
        "sweeps",
        "results",
        "planning",
        "training",
        "snapshots",
        "metrics",
        "tasks",
        "inference",
        "distributed",
        "optim",
        "data",
    ),
    *("models", "storage", "config", "torch_internals", "linux", "errors", "interrupts"),
)
# Named by `python -m mingpt_ddp...` and by user code: a few lines that import the layer behind
# them.
DOORS = (
    *(
        "__init__.py",
        "__main__.py",
        "again.py",
        "evaluate.py",
        "plan.py",
        "registry.py",
    ),
    *("report.py", "sample.py", "snapshots/__main__.py", "versions.py"),
)
WORDS = (
    *(
        "told",
        "tells",
        "hears",
        "heard",
        "sick",
        "sickness",
        "anew",
        "hopeless",
        "beside",
        "put_down",
        "passed_over",
    ),
    *("sick_in_a_row", "neighbours", "leave_out", "meet", "hurry", "insist"),
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the package that a module imports, also in functions and for type
    checking.
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


@every_module
def test_imports_run_down(path):
    if name_of(path) in DOORS:
        return
    own = name_of(path).removesuffix(".py").split("/")[0]
    wrong = [
        name
        for name in imported(tree_of(path))
        if ROOMS.index(name.split(".")[0]) < ROOMS.index(own)
    ]
    assert not wrong, f"{own} may not import {wrong}"


def dotted_name(path: Path) -> str:
    """Return the name of a module below the package."""
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.Module, names: set[str]) -> set[str]:
    """Return which of the modules with these names a module imports, also in functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mingpt_ddp."):
            below = str(node.module).partition(".")[2]
            full = {f"{below}.{alias.name}" for alias in node.names}
            found |= (full & names) or {below}
    return found & names


def test_results_import_no_torch():
    """Neither its modules, also in functions, nor what these import when they are imported."""
    paths = {dotted_name(path): path for path in MODULES}
    left = [name for name in paths if name.split(".")[0] == "results"]
    seen = {*left}
    while left:
        name = left.pop()
        tree = tree_of(paths[name])
        nodes = ast.walk(tree) if name.startswith("results") else tree.body
        of_others = ast.Module(
            [n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))], []
        )
        for node in of_others.body:
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert not any(str(each).split(".")[0] == "torch" for each in named), name
        new = imported_modules(of_others, {*paths}) - seen
        seen |= new
        left += new


def folder_of(path: Path) -> str:
    """Return the folder of a module within its room; the name of a module in the room itself."""
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
    assert top - doors == {*ROOMS, "conf"}  # presets, in a checkout by a link


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=name_of)
def test_no_module_has_a_name_of_the_standard_library(folder):
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert not names & sys.stdlib_module_names


@pytest.mark.parametrize("door", [door for door in DOORS if (PACKAGE / door).exists()])
def test_doors_are_small(door):
    assert code_lines((PACKAGE / door).read_text()) <= 5


def test_what_counts_as_code():
    """An f-string is one token, also on Pythons that split it."""
    source = (
        '"""A docstring."""\n\n# comment\nx = f"{y!r:>{width}} and {f(1)}"\nif x:\n    '
        "pass  # more\n"
    )
    assert (code_tokens(source), code_lines(source)) == (7, 3)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    yield from (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef))


def calls(function: ast.FunctionDef, name: str) -> bool:
    """Return whether a function calls a method, itself and not in a function within it."""
    attributes = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
    return any(isinstance(n, ast.Attribute) and n.attr == name for n in attributes)


def test_there_is_one_training_step():
    """One method on one screen; warm-up passes and diagnosis alone have a backward of their own."""
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
    for function in (loop, found["training/train_step.py:passes"]):
        assert (function.end_lineno or 0) - function.lineno < 40
    for part in ("passes", "clip", "find_in_step", "discard", "update"):
        assert calls(loop, part), part


@every_module
def test_no_attribute_by_its_name_in_vars(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            assert not ast.unparse(node.value).startswith("vars("), f"line {node.lineno}"


def name_in(node: ast.AST) -> str:
    """Return the name of a variable or an attribute, or ""."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_rank(node: ast.expr) -> bool:
    return name_in(node) in ("rank", "local_rank", "RANK", "LOCAL_RANK")


@every_module
def test_rank_conditions(path):
    if name_of(path).startswith("distributed/"):
        return
    for node in ast.walk(tree_of(path)):
        name = name_in(node)
        named = name in ("is_rank_zero", "is_main")
        compared = isinstance(node, ast.Compare) and any(
            map(is_rank, [node.left, *node.comparators])
        )
        compared &= any(isinstance(n, ast.Constant) and n.value == 0 for n in ast.walk(node))
        assert not (named or compared), f"line {node.lineno}: belongs into distributed/"


@every_module
def test_no_stand_in_for_torch(path):
    for node in ast.walk(tree_of(path)):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "sys.modules":
                # of a user's file
                assert ast.unparse(target.slice) == "module.__name__", f"line {node.lineno}"


def identifiers_and_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield identifiers, strings and docstrings with their lines, without comments."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) or token.type == getattr(
            tokenize, "FSTRING_MIDDLE", -1
        ):
            yield token.start[0], token.string


@pytest.mark.parametrize(
    "path", [path for path in MODULES if name_of(path).startswith("training/")], ids=name_of
)
def test_training_knows_no_task(path):
    """What is learnt stands in tasks/; a model may count its operations per token."""
    for line, text in identifiers_and_strings(path):
        found = re.findall(
            r"character|\bgpt|vocab|causal|token(?!s?_per_s)",
            text.replace("flops_per_token", "").lower(),
        )
        assert not found, f"line {line}: {found}"


@every_module
def test_words(path):
    tree = tree_of(path)
    for line, text in identifiers_and_strings(path):
        found = [w for w in WORDS if re.search(rf"(?<![a-zA-Z]){w}(?![a-zA-Z])", text.lower())]
        assert not found, f"line {line}: {found}"
    for node in ast.walk(tree):
        name = next(
            (getattr(node, key) for key in ("id", "arg", "attr", "name") if hasattr(node, key)),
            None,
        )
        assert str(name).lower() != "place", f"line {node.lineno}: place"


def test_the_map_names_what_exists():
    """Of docs/architecture.md: paths, folders, and names of classes, functions and keys."""
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
