"""Check each advice to install an extra, in code and docs: the extra exists and has the package."""

from __future__ import annotations

import configparser
import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.integration

# A wheel contains these directories. Their users have no checkout that `.` could name.
SHIPPED = ("mingpt_ddp", "hydra_plugins", "conf")
READ = (*SHIPPED, "docs", "README.md", "CONTRIBUTING.md", "data/README.md")
EXTRA = re.compile(r"'(mingpt[-_]ddp|\.)\[(.+?)\]'")
NEEDED = re.compile(r"needs? ([A-Za-z][\w-]*)[^'\"\n]* pip install '[^']*\[([\w,]+)\]'")
BARE = re.compile(r"pip install ([a-z][\w-]*(?: [a-z][\w-]*)*)")
REPLACED = re.compile(r"pip install '\.\[[\w,]+\]'")
# The possible values of fields of f-strings.
TRACKERS = ("wandb", "mlflow", "trackio")
FILLED = {"{name}": TRACKERS, "{PLUGINS[preset]}": ("slurm", "ray")}
# Users install these by name: docs/python.md, CONTRIBUTING.md.
NO_EXTRA = {"matplotlib", "pandas", "pre-commit"}


def requirements() -> dict[str, set[str]]:
    """Return the names of the distributions in each extra."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {}
    for name, lines in setup["options.extras_require"].items():
        required = [Requirement(line) for line in lines.splitlines() if line]
        extras[name] = {canonicalize_name(one.name) for one in required}
    return extras


EXTRAS = requirements()


def is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def problems(text: str, is_shipped: bool = True) -> Iterator[str]:
    """Yield each problem with the advice in a text."""
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # joins the parts of a string
    for package, names in EXTRA.findall(text):
        if package != "mingpt_ddp" and (is_shipped or package != "."):
            yield f"{package}[{names}] is no name of the installed package"
        for extra in FILLED.get(names, names.split(",")):
            if extra not in EXTRAS:
                yield f"there is no extra {extra}"
            elif missing := [name for name in EXTRAS[extra] if not is_installed(name)]:
                yield f"of the extra {extra} {missing} are not installed here"
    for line in REPLACED.findall(text):
        yield f"{line} replaces an editable install by a copy: add -e"
    for name, extra in NEEDED.findall(text):
        if canonicalize_name(name) not in EXTRAS.get(extra, ()):
            yield f"the extra {extra} has no {name}"
    for names in BARE.findall(text):
        for name in {*names.split()} - NO_EXTRA:
            if not is_installed(name):
                yield f"{name} is not installed here"


def texts() -> dict[str, str]:
    found = {}
    for name in READ:
        path = ROOT / name
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.suffix in (".py", ".md", ".yaml", ".txt", ".ipynb", ".html"):
                found[str(file.relative_to(ROOT))] = file.read_text()
    return found


def test_all_advice_can_be_followed():
    wrong = []
    for name, text in texts().items():
        wrong += [f"{name}: {problem}" for problem in problems(text, name.startswith(SHIPPED))]
    assert wrong == []
    found = "".join(texts().values())
    assert len(EXTRA.findall(found)) > 25
    needed = {name for name, _ in NEEDED.findall(found)}
    assert needed == {"Optuna", "plotly", "pyarrow", "tokenizers"}
    for name in TRACKERS:
        assert importlib.util.find_spec(name)


@pytest.mark.parametrize(
    ("advice", "problem"),
    [
        ("pip install 'mingpt_ddp[gcs]'", "there is no extra gcs"),
        ("pip install 'mingpt_ddp[s3,gcs]'", "there is no extra gcs"),
        ("pip install 'mingpt_ddp[{kind}]'", "there is no extra {kind}"),
        ("pip install -e '.[s3]'", ".[s3] is no name of the installed package"),
        ("it needs plotly; pip install 'mingpt_ddp[s3]'", "the extra s3 has no plotly"),
        ("pip install no-such-package", "no-such-package is not installed here"),
    ],
)
def test_wrong_advice_is_found(advice, problem):
    assert [*problems(advice)] == [problem]


def test_advice_for_a_checkout_keeps_it_editable():
    wrong = "pip install '.[s3]' replaces an editable install by a copy: add -e"
    assert [*problems("pip install -e '.[s3]'", is_shipped=False)] == []
    assert [*problems("pip install '.[s3]'", is_shipped=False)] == [wrong]
