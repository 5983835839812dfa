"""Provide the text on which all contract tests train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .contract import write_text

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # the tests find processes in /proc, which only Linux has


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")
