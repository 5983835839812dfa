"""Download the wheels that the package and its tests for a GPU need, all but torch.

    make wheels PYTHON_VERSION=3.12 DIR=wheels
    python -m pip install --no-index --find-links wheels -r wheels/requirements.txt   # over there

For a machine with torch and without a network, whose Python may be another than this one. Versions
are those of constraints.txt. The directory gets the requirements too, which leave alone what the
machine has already.
"""

from __future__ import annotations

import argparse
import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("pytest", "pytest-timeout")  # what tests/e2e/test_gpu.py needs
SOURCES = ("antlr4-python3-runtime",)  # packages without a wheel in the index, of pure Python


def requirements() -> list[str]:
    """Return what setup.cfg requires, without torch, and what the tests for a GPU need."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    package = setup["options"]["install_requires"].split()
    tests = setup["options.extras_require"]["test"].split("\n")
    needed = [line for line in package if name_of(line) != "torch"]
    return needed + [line for line in tests if name_of(line) in TESTS]


def name_of(requirement: str) -> str:
    """Return the name of the package that a line requires."""
    return re.split(r"[<>=~!\[; ]", requirement.strip())[0]


def download(directory: Path, python_version: str) -> None:
    """Build the wheels that the index lacks, then download the others."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = directory / "requirements.txt"
    listed.write_text("\n".join(requirements()) + "\n")
    pip = [sys.executable, "-m", "pip"]
    pinned = ["--constraint", str(ROOT / "constraints.txt"), "--quiet"]
    build = ["wheel", *pinned, "--no-deps", "--wheel-dir", str(directory), *SOURCES]
    subprocess.run([*pip, *build], check=True)
    target = [
        "--python-version",
        python_version,
        "--only-binary=:all:",
        "--find-links",
        str(directory),
        "--dest",
        str(directory),
    ]
    subprocess.run([*pip, "download", *pinned, *target, "--requirement", str(listed)], check=True)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("directory", type=Path, help="it is created, and added to")
    made.add_argument("--python-version", default="3.12", help="over there (default: %(default)s)")
    chosen = made.parse_args()
    try:
        download(chosen.directory, chosen.python_version)
    except subprocess.CalledProcessError as error:
        sys.exit(f"pip failed with exit code {error.returncode}; its output above says why")
    count = len([*chosen.directory.glob("*.whl")])
    print(f"{count} wheels for Python {chosen.python_version} in {chosen.directory}; over there:")
    print(
        f"  python -m pip install --no-index --find-links {chosen.directory} "
        f"-r {chosen.directory}/requirements.txt"
    )


if __name__ == "__main__":
    main()
