"""A fixture with a text to plan for."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch) -> Path:
    """Create a working directory with a text. Its splits have 36,000 and 4,000 characters.

    The text has 8 distinct characters.
    """
    (tmp_path / "a.txt").write_text("abcdefgh" * 5000)
    monkeypatch.chdir(tmp_path)
    return tmp_path
