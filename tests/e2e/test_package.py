"""Check the distributions for a package index: their files, their metadata and their types."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from launching import ROOT, TINY, call, copy_source, write_application

pytestmark = pytest.mark.integration

# setuptools sets sys.argv.
BUILD = """
import sys
_, kind, directory = sys.argv
from setuptools import build_meta
print({"sdist": build_meta.build_sdist, "wheel": build_meta.build_wheel}[kind](directory))
"""
# The code of docs/python.md and docs/your-own-model.md with type annotations.
SCRIPT = """
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mingpt_ddp
from mingpt_ddp.errors import UserError
from mingpt_ddp.optim import declare_state
from mingpt_ddp.registry import ModelConfig, TaskConfig, check, on, register
from mingpt_ddp.tasks import LanguageModel


@dataclass(frozen=True)
class MineConfig(ModelConfig):
    n_hidden: int

    def __post_init__(self) -> None:
        check(self.n_hidden > 0, "model.n_hidden must be positive")


@register("model", "mine", MineConfig)
class Mine(nn.Module):
    def __init__(self, config: MineConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.n_hidden)


@register("task", "two_losses", TaskConfig)
class TwoLosses(LanguageModel):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        tokens, targets = batch
        return {"text": model(tokens, targets), "squared": model(tokens).square().mean()}


@declare_state(torch.optim.Adagrad)
def adagrad_state(parameter: Tensor, group: dict[str, object]) -> dict[str, Tensor]:
    return {"step": torch.zeros(()), "sum": torch.zeros_like(parameter)}


@on("end")
def report(result: dict[str, object]) -> None:
    print(result["val_loss"])


def complete(run: mingpt_ddp.LoadedRun, prompt: str) -> str:
    return run.generate(prompt, max_new_tokens=100, top_k=40)


try:
    result = mingpt_ddp.train(["trainer.max_steps=30"], nproc=2)
except UserError as error:
    raise SystemExit(str(error)) from error
run = mingpt_ddp.load(result["run"], step="best")
logits: Tensor = run.model(Tensor([run.tokenizer.encode("The")]).long())
print(complete(run, "The "), logits.shape, run.config["model"], run.step + 1)
jobs = mingpt_ddp.sweep(["optimizer.lr=1e-3,3e-4"], nproc=2) + mingpt_ddp.rows("outputs/lr")
losses: list[float] = [row["val_loss"] for row in mingpt_ddp.history(result["run"]) if "val_loss" in row]
"""  # noqa: E501
WRONG = {
    "mingpt_ddp.train(5)": "arg-type",
    "mingpt_ddp.load('run', step='last')": "arg-type",
    "mingpt_ddp.load('run').generate(1)": "arg-type",
    "mingpt_ddp.load('run').steps": "attr-defined",
    "mingpt_ddp.history('run').keys()": "attr-defined",
    "mingpt_ddp.sweep('run')[0].val_loss": "attr-defined",
}


def build(kind: str, source: Path, directory: Path) -> Path:
    """Build a distribution with the installed setuptools, which needs no package index."""
    pytest.importorskip("setuptools", "77")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(directory)], cwd=source, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return directory / done.stdout.decode().split("\n")[-2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist and the wheel of the checkout."""
    work = tmp_path_factory.mktemp("package")
    copy_source(work / "source")
    return build("sdist", work / "source", work / "dist"), build(
        "wheel", work / "source", work / "dist"
    )


def install(wheel: Path, directory: Path) -> str:
    """Install a wheel into a new environment that also has the packages of this one.

    Returns:
        The path of its Python.
    """
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return str(directory / "bin" / "python")


def site_url() -> str:
    """Return the address of the site."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)
    return settings["site_url"]


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def test_an_index_accepts_both_distributions(built):
    pytest.importorskip("twine")
    done = call(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, built)],
        built[0].parent,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_has_presets_and_types(built):
    files = {*contents(built[1])}
    assert "mingpt_ddp/py.typed" in files
    presets = {f"mingpt_ddp/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    package = {
        str(path.relative_to(ROOT)) for path in (ROOT / "mingpt_ddp").rglob("*") if path.is_file()
    }
    missing = {name for name in presets | package if "__pycache__" not in name} - files
    assert not missing


def test_the_links_of_the_description_name_files_of_the_repository(built):
    """A package index shows the README on its own page, where relative links do not work."""
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    repository = setup["metadata"]["url"]
    assert metadata["Home-page"] == repository
    urls = dict(field.split(", ") for field in metadata.get_all("Project-URL"))
    assert urls["Source"] == repository and urls["Documentation"] == site_url()
    assert all(url.startswith((repository, site_url())) for url in urls.values())
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    description = metadata.get_payload()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", description)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text())) > 30
    for image, link in links:
        path = link.removeprefix(f"{repository}/{'raw' if image else 'blob'}/main/")
        assert path != link and (ROOT / path.partition("#")[0]).exists(), link
    assert not re.search(r"<\w+ [^>]*(src|href)=", description)


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    shutil.unpack_archive(built[0], tmp_path)
    (source,) = tmp_path.iterdir()
    assert contents(build("wheel", source, tmp_path / "dist")) == contents(built[1])


def test_uv_installs_a_checkout(tmp_path):
    """uv asks the package index.

    Without a project table, it would install nothing and exit with code 0.
    """
    uv = pytest.importorskip("uv").find_uv_bin()
    copy_source(tmp_path / "source")
    done = call([uv, "sync", "--dry-run", "--color", "never"], tmp_path / "source")
    assert done.returncode == 0, done.stdout
    assert " + mingpt-ddp" in done.stdout and " + hydra-core" in done.stdout


def test_a_users_application(built, tmp_path):
    write_application(tmp_path)
    words = [f"gpt.{word}" for word in TINY[1:]]
    done = call([install(built[1], tmp_path / "env"), "app.py", *words], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "\nbaseline 0.001 " in done.stdout


def test_mypy_checks_a_users_script(built, tmp_path):
    """mypy accepts a typed script, and finds the errors in wrong calls.

    Without py.typed, it would find no errors in either.
    """
    pytest.importorskip("mypy")
    python = install(built[1], tmp_path / "env")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text("\n".join(["import mingpt_ddp", *WRONG]) + "\n")
    options = ["--strict", "--no-error-summary", "--python-executable", python]
    checked = call(
        [sys.executable, "-m", "mypy", *options, "script.py", "wrong.py"], tmp_path, timeout=500
    )
    found = re.findall(r"^(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", checked.stdout, re.MULTILINE)
    expected = [("wrong.py", str(line), code) for line, code in enumerate(WRONG.values(), 2)]
    assert found == expected, checked.stdout
