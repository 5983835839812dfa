"""YAML and JSON records: we can read what we write, and hostile files cost little."""

from __future__ import annotations

import pytest

from mingpt_ddp.errors import RunError
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

MANY = {"data": {"sources": [[f"/texts/{'a' * 70}_{i:04d}.txt", 1.0] for i in range(1000)]}}


def test_a_large_configuration_can_be_read_again(tmp_path):
    text = dump_yaml(MANY)
    assert len(text) > 1 << 16
    (tmp_path / "config.yaml").write_text(text)
    assert read_yaml(tmp_path / "config.yaml") == MANY


@pytest.mark.parametrize("values", [{"a": [MANY, MANY]}, {"a": 10**2000}])
def test_values_that_could_not_be_read_are_not_written(values):
    """YAML writes a repeated object once, and then an alias."""
    with pytest.raises(ValueError, match="it has "):
        dump_yaml(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * (MAX_YAML_BYTES + 1), "it has "),
        ("[" + "[]," * MAX_YAML_EVENTS + "]", "it is too long: "),
        ("[" * 1000, "it has "),
        ("a: 1" + ":59" * 300_000, "it has "),  # an integer in base 60, as YAML 1.1 writes minutes
        ("a: 1" + ":59" * 300_000 + ".5", "it has "),
        ("a: &b [1]\nc: *b", "it has "),
    ],
)
def test_hostile_yaml(text, message):
    with pytest.raises(ValueError, match=message):
        load_yaml(text)


def test_a_large_result_can_be_read_again(tmp_path):
    result = {f"val_accuracy_of_label_{i}": i / 7 for i in range(10_000)}
    content = dump_json(result, indent=2)
    assert len(content) > 1 << 18
    (tmp_path / "result.json").write_bytes(content)
    assert read_json(tmp_path / "result.json") == result


def test_json_is_read_up_to_its_limit(tmp_path):
    largest = {"a": "x" * (MAX_JSON_BYTES - len(dump_json({"a": ""})))}
    (tmp_path / "a.json").write_bytes(content := dump_json(largest))
    assert len(content) == MAX_JSON_BYTES
    is_same = read_json(tmp_path / "a.json") == largest
    assert is_same
    with pytest.raises(RunError, match=r"cannot record a: it has 16,777,217 bytes, but at most"):
        dump_json({"a": largest["a"] + "x"})
    (tmp_path / "a.json").write_bytes(content + b"\n")
    is_empty = read_json(tmp_path / "a.json") == {}
    assert is_empty
