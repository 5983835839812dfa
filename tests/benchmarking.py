"""Make the modules of benchmarks/, which is not a package, importable in a fixture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "benchmarks"


def modules(*names: str) -> Iterator[SimpleNamespace]:
    """Yield the named modules for the lifetime of the fixture; other tests do not see them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == HOME:
            del sys.modules[name]
