"""Launch runs that pause at a named point.

A sitecustomize module on PYTHONPATH patches the package in every process.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from holding import SETTINGS, HeldRun
from launching import Job

# This code patches modules of the package right after their import, or at once if they are already
# imported. `PATCHES` maps the name of a module to the function that patches it.
SITE = '''
import importlib.abc, importlib.util, os, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def touch(name):
    (HERE / name).touch()

def mine(name):
    """Return the marker's file name for this rank. A forked worker gets its rank after this module is imported."""
    return f"{name}.{os.environ.get('RANK', '0')}"

def pause(name):
    """Report that this rank has reached the point, and wait. Each rank does so only once."""
    if not (HERE / mine(name)).exists():
        (HERE / mine(name)).write_text(str(os.getpid()))
        while not (HERE / "go").exists():
            time.sleep(0.01)

PATCHES = {}
exec((HERE / "patches.py").read_text())

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        patch = PATCHES.pop(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

for name in [name for name in PATCHES if name in sys.modules]:  # imported before a fork
    PATCHES.pop(name)(sys.modules[name])
sys.meta_path.insert(0, Finder())
'''  # noqa: E501


def patches(text: str, **values: Any) -> str:
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return text


class PausedJob(HeldRun):
    """A launch that pauses wherever the code in `patches` calls `pause`."""

    start = Job
    settings = SETTINGS

    def __init__(
        self, command: list[str], cwd: Path, patches: str, *options: str, **extra: str
    ) -> None:
        self.site = cwd / f"site-{time.monotonic_ns()}"
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE)
        (self.site / "patches.py").write_text(patches)
        words = [*command, *self.settings, *options]
        self.job = self.start(words, cwd, PYTHONPATH=str(self.site), **extra)
