"""A recorded result of a complete job counts only if its text is still the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.data.prepare import sha256_of_text
from mingpt_ddp.errors import ChangedTextError
from mingpt_ddp.study.sweeps.kept_results import KeptResults


@pytest.fixture
def config(tmp_path) -> Config:
    """Return the configuration of a job that trains on a user's text."""
    text = tmp_path / "my.txt"
    text.write_text("To be, or not to be. " * 50)
    return from_mapping(configure("model=gpt_nano", "data=text_file", f"data.path={text}"))


def check(run: Path, config: Config, **data: str) -> None:
    run.mkdir()
    recorded = {"data": data} if data else {}
    (run / "result.json").write_text(json.dumps({"status": "complete", **recorded}))
    KeptResults().check(run, config)


def test_a_result_counts_if_its_text_is_the_same_or_not_recorded(config, tmp_path):
    check(tmp_path / "same", config, sha256=sha256_of_text(config.data))
    check(tmp_path / "unknown", config)


def test_a_result_of_another_text_does_not_count(config, tmp_path):
    with pytest.raises(ChangedTextError, match=r"my\.txt is not the text that .*run was trained"):
        check(tmp_path / "run", config, sha256="0" * 64)
