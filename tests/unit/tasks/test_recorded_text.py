"""The format of a run's texts is read from its snapshots."""

from __future__ import annotations

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.tasks.recorded_text import with_recorded_format


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"config": {"data": {"format": "auto"}}}, "auto"),
        ({"config": {"data": {"format": "text"}}}, "text"),
        ({"config": {"data": {}}}, "text"),  # versions without the key
        ({"config": {"data": {"format": [1]}}}, "text"),  # a damaged record
        ({"config": [1]}, "text"),
        (None, "typed"),
    ],
)
def test_texts_have_the_recorded_format(state, expected, log_lines):
    for typed in ("auto", "text"):
        config = from_mapping(configure("data.path=a.txt", f"data.format={typed}"))
        expected_here = typed if expected == "typed" else expected
        for keys in (["data.format"], []):
            log_lines.clear()
            found = with_recorded_format(config, state, keys)
            assert found.data.format == expected_here
            assert len(log_lines) == (bool(keys) and expected_here != typed)
    samples = from_mapping(configure("data=toy", "task=regression", "model=toy"))
    assert with_recorded_format(samples, state, []) is samples


def test_a_format_that_differs_from_the_recorded_one_is_refused():
    for recorded, decided in (("auto", "jsonl"), ("jsonl", "jsonl"), ("auto", "text")):
        text = {} if decided == "text" else {"format": decided}
        state = {"config": {"data": {"format": recorded}}, "text": text}
        for typed in ("auto", "text", "jsonl", "csv"):
            config = from_mapping(configure("data.path=a.txt", f"data.format={typed}"))
            assert with_recorded_format(config, state, []).data.format == recorded
            if typed in ("auto", decided):
                assert with_recorded_format(config, state, ["data.format"]).data.format == recorded
                continue
            with pytest.raises(ConfigError, match=f"{typed}: .* with data.format={decided} so"):
                with_recorded_format(config, state, ["data.format"])
