"""Words of earlier versions are refused in one line that says what to do instead."""

from __future__ import annotations

import pytest
from launching import ROOT

from mingpt_ddp.cli import COMMANDS
from mingpt_ddp.config.config import build_group
from mingpt_ddp.config.hints import known_keys
from mingpt_ddp.config.retired import retired_names
from mingpt_ddp.errors import ConfigError


@pytest.mark.parametrize("word", retired_names())
def test_what_is_retired_is_not_there(word):
    name, _, preset = word.partition("=")
    assert name not in COMMANDS
    assert "." not in name or preset or name not in known_keys()
    assert not (ROOT / "conf" / name / f"{preset}.yaml").exists()


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("ddp", "comm_hook", "old"),  # one of the registered ones
        ("trainer", "precision", "old"),  # one of a few
        ("model", "architecture", "old"),  # selects the keys of its group
    ],
)
def test_a_retired_value(group, key, value, monkeypatch):
    word = f"{group}.{key}={value}"
    monkeypatch.setitem(retired_names(), word, "use new")
    with pytest.raises(ConfigError) as refused:
        build_group(group, {key: value})
    assert str(refused.value) == f"config error: {word} is no longer there; use new"
