"""Records: what is written can be read again, and what is hostile costs little."""

from __future__ import annotations

import pytest

from mingpt_ddp.errors import RunError
from mingpt_ddp.storage import yaml_and_json
from mingpt_ddp.storage.yaml_and_json import (
    MAX_JSON_BYTES,
    MAX_YAML_BYTES,
    MAX_YAML_EVENTS,
    dump_json,
    dump_yaml,
    load_yaml,
    read_json,
    read_yaml,
)

MANY = {"data": {"sources": [[f"/texts/{'a' * 70}_{i:04d}.txt", 1.0] for i in range(5000)]}}


def test_a_large_configuration_is_read_as_it_was_written(tmp_path):
    text = dump_yaml(MANY)
    assert len(text) > 1 << 16
    (tmp_path / "config.yaml").write_text(text)
    assert read_yaml(tmp_path / "config.yaml") == MANY


@pytest.mark.parametrize(
    "values",
    [
        {"a": "x " * (MAX_YAML_BYTES // 2)},
        {"a": [1] * MAX_YAML_EVENTS},
        {"a": [MANY["data"], MANY["data"]]},  # which YAML writes once, with an alias
        {"a": 10**2000},
    ],
)
def test_what_could_not_be_read_is_not_written(values):
    with pytest.raises(ValueError, match="it has "):
        dump_yaml(values)


@pytest.mark.parametrize(
    "text",
    [
        "x" * (MAX_YAML_BYTES + 1),
        "[" + "[]," * MAX_YAML_EVENTS + "]",
        "[" * 1000,
        "a: 1" + ":59" * 300_000,  # an integer in base 60: minutes
        "a: 1" + ":59" * 300_000 + ".5",
        "a: &b [1]\nc: *b",
    ],
)
def test_hostile_yaml(text):
    with pytest.raises(ValueError, match="it has "):
        load_yaml(text)


def test_a_large_result_is_read_as_it_was_written(tmp_path):
    result = {f"val_accuracy_of_label_{i}": i / 7 for i in range(10_000)}
    content = dump_json(result, indent=2)
    assert len(content) > 1 << 18
    (tmp_path / "result.json").write_bytes(content)
    assert read_json(tmp_path / "result.json") == result


def test_json_ends_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_and_json, "MAX_JSON_BYTES", 100)
    assert MAX_JSON_BYTES > 100
    for size in (80, 90):
        (tmp_path / "a.json").write_bytes(dump_json({"a": size * "x"}))
        assert read_json(tmp_path / "a.json") == {"a": size * "x"}
    with pytest.raises(RunError, match=r"cannot record a: it has 101 bytes, of which at most 100"):
        dump_json({"a": 91 * "x"})
    (tmp_path / "a.json").write_bytes(b'{"a": "' + 91 * b"x" + b'"}\n')
    assert read_json(tmp_path / "a.json") == {}
