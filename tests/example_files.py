"""Find the files in examples/, and the command in the docstring of each."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from launching import PATIENCE_S, ROOT, environment

EXAMPLES = ROOT / "examples"


def command_of(example: Path) -> str:
    """Return the command of an example: the first indented block of its docstring."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    block = re.search(r"(?:^ {4}.*\n)+", docstring, re.MULTILINE)
    assert block is not None, f"{example} has no command"
    return textwrap.dedent(block[0]).strip()


def run_in_shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the printed command of an example in a directory that looks like a checkout.

    Standard output and error are both in `stdout`.
    """
    for name in ("main.py", "examples"):
        if not (cwd / name).exists():
            (cwd / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=environment(cwd, PATH=path, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
