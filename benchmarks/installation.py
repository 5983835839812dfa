"""Time what `make train` does before it trains: install into a new environment, and import.

The ways to install alternate: pip as it is by default, which compiles every module; pip with
--no-compile; and uv, which pip installs first. All get the same wheels from a folder, where pip has
downloaded them as its own settings say: no way sees a network, so the times leave the download out,
and uv cannot choose another build of torch. Each installs twice into a new environment of
`python -m venv`: with an empty cache, then with the cache that it has just filled. Then a process
imports what a training run imports, and compiles of it what has not been compiled.

Fails if the ways install different versions. Needs a network, and 4 GB of disk with a CPU build of
torch.

    python benchmarks/installation.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from common import ROOT, alternate, cell, compare, log, parser, report, spread, timed

PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
STATES = ("empty", "filled")  # the cache
PHASES = ("venv", "install", "first import")
BUILD = ["setuptools", "wheel"]  # what an isolated build of a source archive asks for
HEADER = ["way", "cache", "seconds, all", *PHASES, "CPU seconds, all", "against pip, CPU"]
Times = dict[str, tuple[float, float]]  # phase: wall and CPU seconds


def installers(python: str, packages: list[str]) -> dict[str, list[list[str]]]:
    """Return the commands of each way, for the Python of an environment."""
    uv = [str(Path(python).parent / "uv"), "pip", "install", "--quiet", "--python", python]
    return {
        "pip": [[python, *PIP, *packages]],
        "pip --no-compile": [[python, *PIP, "--no-compile", *packages]],
        "uv": [[python, *PIP, "--no-compile", "uv"], [*uv, *packages]],
    }


def download(packages: list[str], wheels: Path) -> float:
    """Download everything with pip, under its settings, and return the seconds."""
    begin = time.perf_counter()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
    subprocess.run([*pip, *packages, *BUILD, "uv"], cwd=ROOT, check=True)
    return time.perf_counter() - begin


def forget_settings(wheels: Path) -> None:
    """Let pip and uv look into the folder alone, and Python compile what it imports."""
    for name in [*os.environ]:
        if name.startswith(("PIP_", "UV_")) or name == "PYTHONDONTWRITEBYTECODE":
            del os.environ[name]
    os.environ |= {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
    for tool in ("PIP", "UV"):
        os.environ |= {f"{tool}_NO_INDEX": "1", f"{tool}_FIND_LINKS": str(wheels)}


def install(way: str, checkout: Path, packages: list[str], cache: Path) -> Times:
    """Set up an environment in the checkout, import, and return the times of each phase."""
    os.environ |= {"PIP_CACHE_DIR": str(cache / "pip"), "UV_CACHE_DIR": str(cache / "uv")}
    venv = checkout / ".venv"
    shutil.rmtree(venv, ignore_errors=True)
    python = str(venv / "bin" / "python")
    made = timed([sys.executable, "-m", "venv", str(venv)], checkout)
    steps = [timed(command, checkout) for command in installers(python, packages)[way]]
    installed = (sum(wall for wall, _ in steps), sum(cpu for _, cpu in steps))
    imported = timed([python, "-c", "import mingpt_ddp.training.run"], checkout)
    return dict(zip(PHASES, (made, installed, imported), strict=True))


def measure(way: str, checkout: Path, packages: list[str]) -> dict[str, Times]:
    """Install with an empty cache, and again with the filled one."""
    with tempfile.TemporaryDirectory(dir=checkout.parent) as cache:
        return {state: install(way, checkout, packages, Path(cache)) for state in STATES}


def versions(checkout: Path) -> set[str]:
    """Return names and versions of what has been installed, without uv."""
    installed = {found.stem for found in checkout.glob(".venv/lib/*/site-packages/*.dist-info")}
    return {name for name in installed if not name.startswith("uv-")}


def all_phases(times: list[dict[str, Times]], state: str, of: int) -> list[float]:
    """Return the sums over the phases, of each repetition: wall seconds (0) or CPU seconds (1)."""
    return [sum(phase[of] for phase in both[state].values()) for both in times]


def row(
    way: str, state: str, times: list[dict[str, Times]], pip: list[dict[str, Times]]
) -> list[str]:
    """Return the row of a way, compared with pip by pairs."""
    phases = [f"{median(both[state][name][0] for both in times):.1f}" for name in PHASES]
    cpu = all_phases(times, state, 1)
    ratio = cell(compare(cpu, all_phases(pip, state, 1)), ".2f")
    walls = cell(spread(all_phases(times, state, 0)), ".1f")
    return [way, state, walls, *phases, cell(spread(cpu), ".1f"), ratio]


def main() -> None:
    options = parser(__doc__, "installation")
    options.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    options.add_argument("--extra", help="of setup.cfg, e.g. test (default: none)")
    chosen = options.parse_args()
    extra = f"[{chosen.extra}]" if chosen.extra else ""
    with tempfile.TemporaryDirectory(prefix="installation-") as scratch:
        wheels, checkout = Path(scratch, "wheels"), Path(scratch, "checkout")
        left_out = shutil.ignore_patterns(".*", "outputs", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, checkout, ignore=left_out)
        constraints = ["--constraint", "constraints.txt"]
        seconds = download([*constraints, f".{extra}"], wheels)
        size = sum(found.stat().st_size for found in wheels.iterdir())
        log(f"downloaded {size / 1e6:.0f} MB in {seconds:.0f} seconds")
        forget_settings(wheels)
        packages = [*constraints, "--editable", f".{extra}"]
        found = {}

        def measured(way: str) -> dict[str, Times]:
            times = measure(way, checkout, packages)
            found[way] = versions(checkout)
            return times

        ways = installers("python", packages)
        values = alternate(
            "install", {way: partial(measured, way) for way in ways}, chosen.repetitions
        )
    for way, names in found.items():
        if names != found["pip"]:
            sys.exit(f"{way} and pip differ in {sorted(names ^ found['pip'])}")
    rows = [row(way, state, values[way], values["pip"]) for state in STATES for way in ways]
    results = {"ways": values, "download": {"seconds": seconds, "bytes": size}}
    report(chosen.out, results, HEADER, rows)


if __name__ == "__main__":
    main()
