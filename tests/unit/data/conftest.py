"""Data configurations for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mingpt_ddp.config.keys.components import DataConfig


@pytest.fixture
def settings(tmp_path):
    """Return a function that makes a data configuration for a path, or for a text to write."""

    def make(content: str | bytes | Path, **changes) -> DataConfig:
        path = content if isinstance(content, Path) else tmp_path / "text.txt"
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        config = DataConfig(
            name="text",
            path=str(path),
            sha256=None,
            block_size=8,
            stride=None,
            train_split=0.9,
            truncate=1.0,
            cache_dir=str(tmp_path / "cache"),
        )
        return replace(config, **changes)

    return make
