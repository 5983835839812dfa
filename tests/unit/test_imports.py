"""Data flows one way through the package: each module imports only what the table allows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mingpt_ddp

PACKAGE = Path(mingpt_ddp.__file__).parent

# Which modules of the package a module may import; the order is that of the flow, and a module comes after all that it
# may import. Those imported inside of functions count as well, those for type checking alone too.
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "status": set(),
    "seeds": set(),
    "cadence": set(),
    "schema": {"errors"},
    "groups": {"schema"},
    "config": {"errors", "groups", "schema"},
    "registry": {"config", "groups", "errors", "schema"},
    "remote": set(),
    "s3": {"remote"},
    "storage": {"errors", "remote", "s3"},
    "plainyaml": set(),
    "place": {"errors"},
    "interrupt": set(),
    "logs": {"errors", "place"},
    "rendezvous": {"errors", "place"},
    "torch_internals": set(),
    "arithmetic": {"errors", "torch_internals"},
    "memory": set(),
    "neighbours": set(),
    "ranks": {"errors", "neighbours", "place", "rendezvous"},
    "hooks": {"errors", "groups", "neighbours", "seeds"},
    "compiling": {"config", "errors", "torch_internals"},
    "recompute": {"errors"},
    "runtime": {
        "arithmetic",
        "compiling",
        "config",
        "groups",
        "errors",
        "hooks",
        "memory",
        "neighbours",
        "place",
        "ranks",
        "torch_internals",
    },
    "reader": {"groups", "errors", "registry"},
    "corpus": {"schema", "groups", "errors", "reader", "storage"},
    "loader": {"groups", "errors", "seeds"},
    "model.cache": {"arithmetic"},
    "model.gpt": {"arithmetic", "groups", "model.cache"},
    "model.modern": {"arithmetic", "groups", "model.cache"},
    "model": {"groups", "errors", "model.gpt", "model.modern", "registry"},
    "decoding": {"arithmetic", "errors", "model", "torch_internals"},
    "generate": {"corpus", "decoding", "model"},
    "muon": {"arithmetic", "groups", "torch_internals"},
    "optim": {"groups", "errors", "muon", "registry"},
    "metrics": {"runtime"},
    "evaluate": {"runtime"},
    "snapshots": set(),
    "snapshots.image": set(),
    "snapshots.tensors": {"errors", "muon", "snapshots.image"},
    "snapshots.lease": {"errors", "storage"},
    "snapshots.format": {"errors"},
    "snapshots.store": {"errors", "memory", "snapshots.format", "snapshots.image", "snapshots.lease", "storage"},
    "snapshots.find": {"errors", "plainyaml", "snapshots.format", "snapshots.store", "storage"},
    "snapshots.background": {"errors", "runtime", "snapshots.format", "snapshots.image", "snapshots.store"},
    "snapshots.position": {"config", "corpus", "errors", "schema"},
    "snapshots.saver": {
        *("config", "corpus", "errors", "runtime", "snapshots.background", "snapshots.find"),
        *("snapshots.format", "snapshots.position", "snapshots.store", "snapshots.tensors"),
    },
    "rehearsal": {
        *(
            "compiling",
            "config",
            "errors",
            "loader",
            "model",
            "recompute",
            "optim",
            "registry",
            "runtime",
            "seeds",
            "snapshots.tensors",
        ),
    },
    "rundir": {"config", "errors", "snapshots.lease", "storage", "plainyaml"},
    "watch": {"ranks", "torch_internals"},
    "guard": {"config", "errors", "snapshots.position"},
    "stepper": {"config", "loader", "muon", "optim", "runtime", "seeds"},
    "history": {"errors", "storage"},
    "prune": {"config", "errors", "history", "runtime"},
    "peak": set(),
    "journal": {"config", "history", "logs", "metrics", "peak", "runtime"},
    "saves": {
        *("cadence", "config", "errors", "guard", "journal", "runtime"),
        *("snapshots.position", "snapshots.saver", "stepper"),
    },
    "trainer": {
        *("config", "errors", "evaluate", "guard", "interrupt", "journal"),
        *("prune", "runtime", "saves", "snapshots.position", "snapshots.saver", "status", "stepper"),
    },
    "run": {
        *(
            "config",
            "corpus",
            "errors",
            "evaluate",
            "generate",
            "history",
            "interrupt",
            "journal",
            "loader",
            "logs",
            "metrics",
        ),
        *(
            "model",
            "optim",
            "peak",
            "place",
            "prune",
            "recompute",
            "registry",
            "rehearsal",
            "rundir",
            "runtime",
            "seeds",
        ),
        *(
            "snapshots.find",
            "snapshots.position",
            "snapshots.saver",
            "snapshots.store",
            "status",
            "stepper",
            "storage",
            "trainer",
            "watch",
        ),
    },
    "composed": {"config", "registry", "schema"},
    "report.values": set(),
    "report.runs": {"errors", "history", "plainyaml", "report.values", "storage"},
    "report.command": {"composed", "report.runs", "report.values"},
    "report.table": {"errors", "report.command", "report.runs", "report.values"},
    "report.scales": {"report.values"},
    "report.svg": {"errors", "report.scales"},
    "report.plots": {"report.runs", "report.scales", "report.svg", "report.values"},
    "report.page": {
        *("report.command", "report.plots", "report.runs", "report.svg", "report.table", "report.values"),
    },
    "report": {"errors", "report.page", "report.runs", "report.table", "storage"},
    "leave": {"errors", "logs", "place", "rendezvous", "runtime"},
    "workers": {"config", "errors", "leave", "loader", "place", "rendezvous", "rundir", "runtime", "status"},
    "search": {"errors", "place"},
    "jobs": {"config", "rundir", "status"},
    "sweep": {"composed", "config", "errors", "jobs", "leave", "place", "report", "rundir", "search"},
    "launch": {
        *("composed", "config", "errors", "interrupt", "leave", "logs", "place", "run", "rundir", "runtime"),
        *("schema", "status", "storage", "sweep", "workers"),
    },
    "sample": {
        *(
            "arithmetic",
            "config",
            "groups",
            "corpus",
            "decoding",
            "errors",
            "generate",
            "leave",
            "logs",
            "model",
            "place",
        ),
        *("registry", "schema", "snapshots.find", "snapshots.format", "snapshots.tensors", "storage"),
    },
    "snapshots.survey": {
        *("errors", "schema", "snapshots.find", "snapshots.format", "snapshots.store", "storage"),
    },
    "snapshots.manage": {
        *("groups", "errors", "rundir", "sample", "snapshots.find", "snapshots.format", "snapshots.image"),
        *("snapshots.lease", "snapshots.store", "snapshots.survey", "storage"),
    },
    "snapshots.__main__": {
        *("errors", "leave", "logs", "place", "sample", "schema", "snapshots.manage", "snapshots.survey", "storage"),
    },
    "report.__main__": {"errors", "leave", "report"},
    "__main__": {"launch"},
}


def name_of(path: Path) -> str:
    """`model/gpt.py` is model.gpt, `model/__init__.py` is model."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(source: str, modules: set[str]) -> set[str]:
    """The package's modules that a source text imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            parent = node.module or ""
            # `from mingpt_ddp import logs` imports a module, `from mingpt_ddp.logs import Console` a name of one
            names = [f"{parent}.{a.name}" if f"{parent}.{a.name}"[11:] in modules else parent for a in node.names]
        else:
            continue
        found |= {name.removeprefix("mingpt_ddp").lstrip(".") or "__init__" for name in names if is_ours(name)}
    return found


def is_ours(name: str) -> bool:
    return name == "mingpt_ddp" or name.startswith("mingpt_ddp.")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, mingpt_ddp.config", {"config"}),
        ("import mingpt_ddp", {"__init__"}),
        ("from mingpt_ddp import logs, __version__", {"logs", "__init__"}),
        ("from mingpt_ddp.model.gpt import GPT", {"model.gpt"}),
        ("from mingpt_ddp.model import GPT, gpt", {"model", "model.gpt"}),
        ("def f():\n    if True:\n        from mingpt_ddp.run import run", {"run"}),
        ("import mingpt_ddp_extras\nfrom os import path", set()),
    ],
)
def test_imports_are_found(source, expected):
    assert imported(source, set(FILES)) == expected


@pytest.mark.parametrize("module", FILES)
def test_module_imports_only_what_the_table_allows(module):
    assert module in ALLOWED, f"{module} is not in the table of test_imports.py; say what it may import"
    surplus = imported(FILES[module].read_text(), set(FILES)) - ALLOWED[module]
    assert not surplus, f"{module} imports {', '.join(sorted(surplus))}"


def test_the_table_is_about_modules_that_exist():
    assert ALLOWED.keys() <= FILES.keys()


def test_data_flows_one_way():
    """A module may import only what stands above it in the table, so that there is no cycle."""
    order = list(ALLOWED)
    for module, allowed in ALLOWED.items():
        later = [name for name in allowed if order.index(name) >= order.index(module)]
        assert not later, f"{module} stands above {', '.join(later)}"


def test_the_loop_knows_no_model_no_text_and_no_launcher():
    assert ALLOWED["trainer"].isdisjoint(
        {"model", "model.gpt", "model.modern", "corpus", "generate", "place", "launch", "run"}
    )


def test_what_the_first_error_needs_does_not_import_torch():
    """A mistyped key is told before a second is spent on torch: these modules do without it when they are loaded."""
    for module in (
        "errors",
        "schema",
        "groups",
        "config",
        "registry",
        "storage",
        "place",
        "logs",
        "composed",
        "leave",
        "sweep",
        "launch",
    ):
        top = ast.parse(FILES[module].read_text()).body
        direct = [node for node in top if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in direct if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in direct if isinstance(node, ast.ImportFrom)}
        assert not [name for name in names if name.split(".")[0] == "torch"], module


def test_only_place_reads_the_variables_of_the_launcher():
    """RANK and its relatives have one reader; `launch` only asks whether there are any."""
    words = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for module, path in FILES.items():
        strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert module == "place" or strings.isdisjoint(words), module
