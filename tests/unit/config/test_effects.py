"""The schema says for each key what it changes, and every part of the package agrees.

The parts are run names, replicates, the notes of a report, and replays. tests/e2e/test_effects.py
trains to check that keys marked as changing nothing do change nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from fake_runs import fake_run

from mingpt_ddp.config.config import (
    OMITTED_IF_NULL,
    default_values,
    effect_of,
    values_in_name,
)
from mingpt_ddp.config.hints import known_keys
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.fields import enters_name
from mingpt_ddp.config.keys.schema import GROUPS, selected
from mingpt_ddp.config.recorded import PLACES, with_defaults
from mingpt_ddp.config.validation import adapter
from mingpt_ddp.snapshots.write.ledger import NOT_IN_SETTINGS, digest_settings
from mingpt_ddp.study.results.groups import replicates
from mingpt_ddp.study.results.notes import pooling_notes
from mingpt_ddp.study.results.runs import read_jobs

CHOSEN: dict[str, str | None] = {
    "task": "language_model",
    "model": "gpt",
    "optimizer": "adamw",
    "data": None,
}
# Other values for text keys that must have a certain format.
OTHER_TEXTS = {"sha256": "0" * 64, "init_sha256": "0" * 64}


# These keys enter the settings of a run only by way of its number of steps.
LENGTH_KEYS = ("optimizer.schedule_steps", "trainer.max_minutes")

# No dataset is built in. This one has the keys that all datasets have.
DATASET = {"mine": DatasetConfig}


@pytest.fixture(autouse=True)
def own_dataset(monkeypatch):
    monkeypatch.setitem(GROUPS["data"][1], "mine", DatasetConfig)


def classes_of(group: str) -> dict[str | None, type]:
    return {**GROUPS[group][1], **(DATASET if group == "data" else {})}


def values_of(**chosen: str | None) -> dict[str, dict[str, Any]]:
    """Return a recorded configuration with a value for every key of the chosen classes."""
    values = {}
    for group, (selectors, _) in GROUPS.items():
        if group == "sweep":  # runs do not record this group
            continue
        choice = {**CHOSEN, **chosen}.get(group)
        cls = classes_of(group)[choice]
        values[group] = default_values(cls)
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING:
                is_text = field.type in (str, "str")
                values[group][field.name] = "x" if is_text else 4
        if choice is not None:
            values[group][selectors[0]] = choice
        if group in CHOSEN:  # a `code` key that is null is not recorded
            values[group]["code"] = "mine.py"
    return values


def other_value(schema: dict[str, Any], key: str, value: Any) -> Any:
    """Return a valid value for this key that differs from the given one."""
    for option in schema.get("anyOf", [schema]):
        if "enum" in option:
            return next(each for each in option["enum"] if each != value)
        if "const" in option and option["const"] != value:
            return option["const"]
        if option.get("type") == "boolean":
            return not value
        if option.get("type") in ("integer", "number"):
            return value + 1 if isinstance(value, (int, float)) else 1
        if option.get("type") == "string":
            return OTHER_TEXTS.get(key, "other")
        if option.get("type") == "array":
            return [["other.txt", 1.0]] if key == "sources" else [3, 4]
        if option.get("type") == "object":
            return {"other": "other.txt"}
    raise AssertionError(schema)


def cases() -> list[Any]:
    """Return a case for each key of each class: a configuration and another value for the key."""
    found = {}
    for group in GROUPS:
        for choice, cls in classes_of(group).items():
            schemas = adapter(cls).json_schema()["properties"]
            for field in dataclasses.fields(cls):
                if group == "sweep":
                    continue
                values = values_of(**({group: choice} if choice else {}))
                value = values[group].get(field.name)
                other = other_value(schemas[field.name], field.name, value)
                key = f"{group}.{field.name}"
                found[f"{key} {choice or ''}"] = pytest.param(
                    values, key, field, other, id=f"{key} {choice or ''}".strip()
                )
    return [*found.values()]


def with_value(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    group, _, name = key.partition(".")
    return {**values, group: {**values[group], name: value}}


def is_pooled(key: str) -> bool:
    """Return True if runs that differ in this key and the seed count as replicates.

    docs/configuration.md describes the rule.
    """
    if key == "trainer.eval_steps":
        return False
    return effect_of(key) in ("nothing", "rounding", "measurement")


@pytest.mark.parametrize(("values", "key", "field", "other"), cases())
def test_every_part_of_the_package_treats_a_key_as_the_schema_says(
    values, key, field, other, tmp_path, monkeypatch
):
    group, _, name = key.partition(".")
    selectors, classes = GROUPS[group]
    if name in selectors:
        monkeypatch.setitem(classes, other, classes[selected(group, values[group])[1]])
    changed = with_value(values, key, other)
    assert changed != values
    assert (values_in_name(changed) != values_in_name(values)) == enters_name(field)

    bits = effect_of(key) in ("training", "rounding") and key not in NOT_IN_SETTINGS
    before, after = ({"config": each, "steps": 10} for each in (values, changed))
    if key not in LENGTH_KEYS:
        assert (digest_settings(before) != digest_settings(after)) == bits

    for seed, config in enumerate((values, changed), start=1):
        seeded = config if key == "run.seed" else with_value(config, "run.seed", seed)
        directory = fake_run(tmp_path / f"run{seed}")
        (directory / "config.yaml").write_text(yaml.safe_dump(seeded))
    groups = replicates(read_jobs([tmp_path]))
    if key == "run.seed":
        assert len(groups) == 1
        return
    assert len(groups) == (1 if is_pooled(key) else 2)
    is_named = any(key in note for note in pooling_notes(groups))
    if name != "name":  # the label of a preset is never noted
        assert is_named == (is_pooled(key) and key not in PLACES)


def test_settings_stay_equal_when_max_minutes_becomes_a_number_of_steps():
    """A replay may then repeat steps from before and after that moment together.

    No learning rate before it depends on the number of steps.
    """
    values = values_of()
    minutes = with_value(values, "trainer.max_minutes", 1.0)
    longer = with_value(values, "trainer.max_minutes", 2.0)
    before, after = (digest_settings({"config": minutes, "steps": steps}) for steps in (99, 500))
    assert before == after != digest_settings({"config": longer, "steps": 500})
    before, after = (digest_settings({"config": values, "steps": steps}) for steps in (99, 500))
    assert before != after


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "sweep"])
def test_a_recorded_run_without_a_key_has_its_default(group, tmp_path):
    """Runs of earlier versions can be pooled with runs that have recorded every key."""
    values = values_of()
    for field in dataclasses.fields(GROUPS[group][1][CHOSEN.get(group)]):
        older = {**values, group: {**values[group]}}
        if field.name in OMITTED_IF_NULL:
            continue
        if field.default is dataclasses.MISSING or older[group].pop(field.name, ...) is ...:
            continue
        assert with_defaults(older) == with_defaults(values), field.name
    assert with_defaults({**values, "trainer": {**values["trainer"], "prune": "none"}}) == values


def test_keys_of_a_class_that_is_not_registered_change_the_training(tmp_path):
    for seed, alpha in ((1, 0.5), (2, 0.7)):
        optimizer = {"name": "mine", "lr": 0.1, "alpha": alpha}
        config = {**values_of(), "optimizer": optimizer}
        directory = fake_run(tmp_path / f"run{seed}")
        (directory / "config.yaml").write_text(yaml.safe_dump(with_value(config, "run.seed", seed)))
    one, _ = read_jobs([tmp_path])
    assert one.config["optimizer.weight_decay"] == 0.1  # the default of the base class
    assert len(replicates([one, _])) == 2


def test_the_evaluation_interval_changes_a_run_that_has_patience(tmp_path):
    for seed, every in ((1, 10), (2, 20)):
        values = {"run.seed": seed, "trainer.eval_every": every, "trainer.patience": 3}
        fake_run(tmp_path / f"run{seed}", values)
    assert len(replicates(read_jobs([tmp_path]))) == 2


def test_classes_that_share_a_key_mark_it_the_same_way():
    for group, (_, classes) in GROUPS.items():
        for cls in classes.values():
            for field in dataclasses.fields(cls):
                same = known_keys()[f"{group}.{field.name}"]
                marks = field.metadata["json_schema_extra"], same.metadata["json_schema_extra"]
                assert marks[0]["changes"] == marks[1]["changes"], (cls, field.name)
                assert enters_name(field) == enters_name(same), (cls, field.name)
