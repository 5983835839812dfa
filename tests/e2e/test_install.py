"""Install the extras into an empty environment as a user does, without constraints.txt, and use
them.

This shows that the bounds in setup.cfg are sufficient. The extras in USES are installed into one
environment: the index serves only final releases for them, and they work. For Ray, only the
releases are checked. `make lowest` checks the lower bounds.

torch is not installed, since it has 200 MB, or gigabytes with CUDA. It is linked from the running
environment, and pip resolves its requirements together with all others.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from launching import ROOT, TINY, WITH_TOY, call, copy_source
from packaging.requirements import Requirement
from packaging.version import Version
from runs import succeed

TRAIN = ["-m", "mingpt_ddp", *TINY, "trainer.max_steps=1", "data.truncate=0.01"]
USES = {
    "report": ["-c", "from mingpt_ddp.study.results.page.page import get_plotlyjs; get_plotlyjs()"],
    "s3": ["-c", "from mingpt_ddp.storage.urls import fsspec; fsspec.filesystem('s3', anon=True)"],
    "slurm": [*TRAIN, "-m", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2"],
    "tokenizers": [*TRAIN, "data.tokenizer=bpe", "data.vocab_size=300", "run.name=bpe"],
    "sweep": [*TRAIN, "-m", "sweep=optuna_lr", "sweep.trials=1"],
}
EXAMPLE = ["-m", "mingpt_ddp", WITH_TOY, "experiment=toy", "trainer.max_steps=1"]
NOT_INSTALLED = {
    "ray": "1.9 GB; what pip would install is looked at",
    "data": "45 MB; tests/unit/data/test_parquet.py uses it",
    "export": "60 MB, which only the exported modelling file imports",
    "wandb": "large; tests/e2e/test_trackers.py uses it",
    "mlflow": "large; tests/e2e/test_trackers.py uses it",
    "trackio": "large; tests/e2e/test_trackers.py uses it",
    "kubernetes": "models for a test of a manifest",
    "integrations": "the environment of make test-integrations",
    "test": "the environment that runs the tests",
    "docs": "the tools of make site, nothing that a user runs",
    "dev": "the tools of make check, nothing that a user runs",
}
# Ray requires these packages, which have only beta releases.
WITHOUT_A_FINAL_RELEASE = {
    "opentelemetry-exporter-prometheus",
    "opentelemetry-semantic-conventions",
}


def pip(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run pip without constraints or other settings from the environment of the tests."""
    return call([sys.executable, "-m", "pip", *map(str, args)], cwd, PIP_CONSTRAINT="", PIP_PRE="0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the package's wheel in a copy of the checkout.

    Skip the tests if no index answers or torch cannot be linked.
    """
    if torch.version.cuda is not None:
        pytest.skip("torch here is a CUDA build, whose libraries in other packages are not linked")
    work = tmp_path_factory.mktemp("wheel")
    probe = pip(
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--retries=0",
        "--timeout=10",
        "hydra-core",
        cwd=work,
    )
    if probe.returncode:
        pytest.skip(f"no package index answers: {probe.stdout.splitlines()[-1]}")
    source = work / "source"
    copy_source(source)
    built = pip("wheel", "--quiet", "--no-deps", "--wheel-dir", work / "wheels", source, cwd=work)
    assert built.returncode == 0, built.stdout
    return next((work / "wheels").glob("mingpt_ddp-*.whl"))


def make_environment(path: Path) -> Path:
    """Make a virtual environment that contains only torch. Return its site-packages.

    Torch's METADATA is copied but not its RECORD, so pip considers torch installed and cannot
    remove it.
    """
    venv.create(path, symlinks=True)
    site = next(path.glob("lib/python*/site-packages"))
    installed = importlib.metadata.distribution("torch")
    metadata = Path(str(installed.locate_file(f"torch-{installed.version}.dist-info")))
    for name in ("torch", "torchgen"):
        (site / name).symlink_to(metadata.parent / name)
    (site / metadata.name).mkdir()
    shutil.copy(metadata / "METADATA", site / metadata.name)
    return site


def install(extras: str, wheel: Path, work: Path, *options: object) -> Path:
    """Install the package with extras into a new environment in `work`.

    Returns:
        The environment's site-packages.
    """
    site = make_environment(work / "env")
    (work / "torch.txt").write_text(f"torch=={torch.__version__}\n")
    args = [
        "install",
        "--quiet",
        "--no-compile",
        *options,
        "-c",
        work / "torch.txt",
        f"{wheel}[{extras}]",
    ]
    done = pip("--python", work / "env" / "bin" / "python", *args, cwd=work)
    assert done.returncode == 0, done.stdout
    return site


def prereleases(versions: dict[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if Version(version).is_prerelease}


def test_every_extra_is_used_or_has_a_reason():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert {*USES, *NOT_INSTALLED} == {*setup["options.extras_require"]}


def test_no_bound_admits_a_prerelease():
    """A plugin requires `hydra-core>=1.1.0.dev7`.

    Because of this, pip installs pre-releases of Hydra unless setup.cfg has a bound.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    fields = [setup["options"]["install_requires"], *extras.values()]
    found = [Requirement(line) for field in fields for line in field.split("\n") if line]
    assert [str(one) for one in found if one.specifier.prereleases] == []
    for name in ("ray", "slurm"):
        of_extra = [Requirement(line) for line in extras[name].split("\n") if line]
        bounds = [one.specifier for one in of_extra if one.name == "hydra-core"]
        assert bounds, name
        assert not bounds[0].contains("1.4.0rc3", prereleases=True), name


@pytest.mark.slow
def test_ray_resolves_to_final_releases(wheel, tmp_path):
    """pip only reports the releases that it would install, since Ray has 1.9 GB."""
    install("ray", wheel, tmp_path, "--dry-run", "--report", tmp_path / "report.json")
    chosen = [
        found["metadata"] for found in json.loads((tmp_path / "report.json").read_text())["install"]
    ]
    versions = {found["name"]: found["version"] for found in chosen}
    assert {"hydra-core", "ray"} <= {*versions}
    assert {*prereleases(versions)} <= WITHOUT_A_FINAL_RELEASE


@pytest.mark.slow
def test_the_extras_work_without_constraints(wheel, tmp_path):
    site = install(",".join(USES), wheel, tmp_path)
    versions = {
        found.name: found.version for found in importlib.metadata.distributions(path=[str(site)])
    }
    assert prereleases(versions) == {}
    for args in (*USES.values(), EXAMPLE):
        succeed([str(tmp_path / "env" / "bin" / "python"), *args], tmp_path, PYTHONPATH="")
