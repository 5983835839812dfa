"""The modules of benchmarks/, which are no package, for a test's fixture."""

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
    """Those of these names, while the fixture lasts; no other test meets them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == HOME:
            del sys.modules[name]
