"""`mingpt-ddp COMMAND` runs a command. `python -m` refuses every other module of the package."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from importlib import import_module

import pytest
from launching import PATIENCE_S, ROOT, call
from tools import call_tool

from mingpt_ddp import __version__
from mingpt_ddp.cli import COMMANDS, main
from mingpt_ddp.errors import command

PACKAGE = ROOT / "mingpt_ddp"
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))
]
OTHERS = [
    name
    for name in MODULES
    if name.removesuffix(".__main__").removesuffix(".__init__") != "mingpt_ddp"
]
NAMES = ", ".join(COMMANDS)
REFUSAL = f"is not a command; write python -m mingpt_ddp COMMAND; the commands are {NAMES}\n"


@pytest.fixture
def run(monkeypatch, capsys):
    return call_tool(main, monkeypatch, capsys)


def python_m(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_no_other_module_is_runnable(every):
    """`python -m MODULE` prints one line and exits with code 2.

    Every 12th module is tried, and each one in `make test-slow`.
    """
    for name in [*sorted(OTHERS)[::every], "mingpt_ddp.training", "mingpt_ddp.nowhere"]:
        done = python_m("-m", name, "outputs/x", "step=1")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"config error: {name} {REFUSAL}"
    refused = python_m("-Wignore", "-mmingpt_ddp.errors").stderr
    assert refused == f"config error: mingpt_ddp.errors {REFUSAL}"


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"train"}))
def test_commands_run(name):
    needs_help = name == "plan"  # without arguments, this command runs
    spelled = [["-m", "mingpt_ddp", name, *["--help"] * needs_help]]
    if name == "sample":  # Other spellings do not depend on the command: one of them is enough.
        spelled += [["-mmingpt_ddp", name, "--help"], ["-Wignore", "-m", "mingpt_ddp", name]]
    for args in spelled:
        done = python_m(*args)
        expected = f"python -m mingpt_ddp {name} "
        assert (done.returncode, done.stderr) == (0, "") and expected in done.stdout


def test_a_module_name_as_an_argument(tmp_path):
    """The refusal is only for the module that `python -m` runs.

    Its arguments, and the imports while Python locates it, do not count.
    """
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import mingpt_ddp.registry")
    (tmp_path / "mine" / "__main__.py").write_text("print('it runs')")
    done = call(
        [sys.executable, "-m", "mine", "mingpt_ddp.errors"],
        tmp_path,
        PYTHONPATH=f"{ROOT}:{tmp_path}",
    )
    assert (done.returncode, done.stdout) == (0, "it runs\n")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"train", "again", "versions"}))
def test_a_command_gets_its_arguments(name, run):
    code, out, _ = run(name, "--help")
    assert (code, out) == (0, import_module(f"mingpt_ddp.cli.commands.{name}").__doc__ + "\n")
    first = {"snapshots": ["list"], "plan": []}.get(name, ["nowhere"])
    code, out, err = run(name, *first, "stepp=1")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(
        "config error: stepp is not a key"
    )


CONSOLE = "/env/bin/mingpt-ddp"
MAIN = "from mingpt_ddp.cli.main import main"


@pytest.mark.parametrize(
    ("program", "train", "report"),
    [
        (CONSOLE, "mingpt-ddp train", "mingpt-ddp report"),
        (f"{ROOT}/main.py", f"python {ROOT}/main.py", "python -m mingpt_ddp report"),
        (f"{ROOT}/sample.py", "python -m mingpt_ddp", "python -m mingpt_ddp report"),
        (f"{PACKAGE}/__main__.py", "python -m mingpt_ddp", "python -m mingpt_ddp report"),
        # A main.py of another project.
        ("main.py", "python -m mingpt_ddp", "python -m mingpt_ddp report"),
    ],
)
def test_messages_name_commands_as_the_user_calls_them(
    program, train, report, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program])
    assert (command(), command("report")) == (train, report)


def test_workers_name_commands_as_their_parent_does(monkeypatch):
    monkeypatch.setattr(sys, "argv", [CONSOLE])
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(command) == "mingpt-ddp train"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_an_installed_command_does_not_mention_a_checkout(name):
    program = f"import sys; sys.argv[0] = {CONSOLE!r}; {MAIN}; main()"
    out = python_m("-c", program, name, "--help").stdout
    assert f"mingpt-ddp {name} " in out
    assert "main.py" not in out and "python -m" not in out


def test_help_lists_the_commands(run):
    for args in ([], ["--help"], ["-h"]):
        code, out, err = run(*args)
        assert (code, err) == (0, "") and len(out.splitlines()) < 20
        assert [line.split()[0] for line in out.splitlines() if line[:1].islower()] == list(
            COMMANDS
        )


@pytest.mark.parametrize("words", [[], ["plan"], ["snapshots"], ["again"]])
def test_version(run, words):
    assert run(*words, "--version") == (0, f"mingpt_ddp {__version__}\n", "")


@pytest.mark.parametrize("words", [["main.py"], ["-c", f"{MAIN}; main()", "train"]], ids=len)
def test_train_and_main_py_are_the_same(words):
    """Both pass the remaining words to Hydra."""
    done = python_m(*words, "model.n_head=5", "--cfg", "job", "--package", "model")
    assert (done.returncode, done.stderr) == (0, "")
    assert "n_head: 5\n" in done.stdout


def test_an_unknown_command(run):
    assert run("smaple", "x") == (
        2,
        "",
        "config error: smaple is not a command; did you mean sample?\n",
    )
    code, out, err = run("s3://name:hunter2@bucket/run")
    assert (code, out, err.count("\n")) == (2, "", 1) and "hunter2" not in err
