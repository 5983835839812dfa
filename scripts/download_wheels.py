"""Download the wheels that the package and its GPU tests need, for a machine without a network.

    make wheels PYTHON_VERSION=3.12 DIR=wheels
    python -m pip install --no-index --find-links wheels -r wheels/requirements.txt   # there

The other machine must already have torch, whose wheel is left out. Its version of Python may differ
from the one here. constraints.txt decides the versions. The directory also gets a requirements.txt.
Installing from it keeps all packages that the machine already has.
"""

from __future__ import annotations

import argparse
import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("pytest", "pytest-timeout")  # packages that tests/e2e/test_gpu.py needs
SOURCES = ("antlr4-python3-runtime",)  # pure Python packages that have no wheel in the index


def requirements() -> list[str]:
    """List the requirements of setup.cfg without torch, and the packages of the GPU tests."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory for the wheels, created if needed")
    parser.add_argument(
        "--python-version",
        default="3.12",
        help="version of Python on the other machine (default: %(default)s)",
    )
    chosen = parser.parse_args()
    try:
        download(chosen.directory, chosen.python_version)
    except subprocess.CalledProcessError as error:
        sys.exit(f"pip failed with exit code {error.returncode}; see its output above")
    count = len([*chosen.directory.glob("*.whl")])
    print(
        f"{count} wheels for Python {chosen.python_version} are in {chosen.directory}; "
        "install them on the other machine:"
    )
    print(
        f"  python -m pip install --no-index --find-links {chosen.directory} "
        f"-r {chosen.directory}/requirements.txt"
    )


if __name__ == "__main__":
    main()
