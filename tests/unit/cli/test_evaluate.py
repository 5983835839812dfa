"""The evaluate command: what it refuses leaves nothing behind."""

from __future__ import annotations

import pytest
from snapshot_helpers import filled

from mingpt_ddp.cli.evaluate import EvaluateConfig, evaluate
from mingpt_ddp.errors import DataError


def test_a_text_with_other_characters_leaves_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    filled(str(tmp_path / "run"), 8)
    (tmp_path / "other.txt").write_text("xyz" * 100)
    with pytest.raises(DataError, match="the model does not know 'x', 'y', 'z'"):
        evaluate(EvaluateConfig([str(tmp_path / "run")], data_path=str(tmp_path / "other.txt"), device="cpu"))
    assert not (tmp_path / "cache").exists()
