"""A text to plan for."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch) -> Path:
    """The working directory, with a text of 36,000 + 4,000 characters, 8 of them distinct."""
    (tmp_path / "a.txt").write_text("abcdefgh" * 5000)
    monkeypatch.chdir(tmp_path)
    return tmp_path
