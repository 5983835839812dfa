"""What tests of reports share."""

from __future__ import annotations

import sys

import pytest

from mingpt_ddp.results import intervals


@pytest.fixture
def no_scipy(monkeypatch):
    """Python without scipy, as far as reports look for it."""
    intervals.has_intervals.cache_clear()
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    yield
    intervals.has_intervals.cache_clear()
