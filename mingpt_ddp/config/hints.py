"""Suggest the key that an unknown key was meant to be; nanoGPT's, Lightning's and HF's count."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.fields import describe
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.config.validation import did_you_mean, hint_at

MIN_SIMILARITY = 0.75  # of a key in any group, where the word may belong to no key at all
# What a key of ours is, where another program's has another meaning.
FORMULAS = {
    "gradient_accumulation_steps": "trainer.batch_size / (ranks x gradient_accumulation_steps)",
    "accumulate_grad_batches": "trainer.batch_size / (ranks x accumulate_grad_batches)",
    "min_lr": "min_lr / optimizer.lr",
    "warmup_ratio": "warmup_ratio x steps",
}


def suggest(key: str, chosen: Iterable[str] | None = None) -> str:
    """Return a suggestion for an unknown dotted key, from its group or from all keys.

    Args:
        chosen: the names of the keys in its group, if the group is known.
    """
    known = known_keys()
    group, _, name = key.rpartition(".")
    if chosen is not None:
        names = [*chosen]
    else:
        names = [k.removeprefix(f"{group}.") for k in known if k.startswith(f"{group}.")]
    if key in known:
        return f" of the chosen {group}"
    aliases = {word: ours for ours, words in other_names().items() for word in words.split()}
    ours = aliases.get(key) or aliases.get(name)
    if ours is not None:
        in_group = ours.startswith(f"{group}.")
        if not names or not in_group or ours.removeprefix(f"{group}.") in names:
            # the unit may differ
            meaning = f" ({describe(known[ours].metadata)})" if ours in known else ""
            formula = f" = {FORMULAS[name]}" if name in FORMULAS else ""
            return f"; did you mean {ours}{meaning}{formula}?"
    alike = [other for other in known if other.endswith(f".{name}")]
    if alike and (not group or group in GROUPS or len(alike) == 1):
        return f"; did you mean {alike[0]}?"
    if names:
        alias = did_you_mean(name, [*names, *aliases], MIN_SIMILARITY)
        if alias in aliases and alias != name:
            return suggest(f"{group}.{alias}", names)
        return f"; {hint_at(name, names, f'{group}.')}"
    meant = did_you_mean(key, [*GROUPS, *known], MIN_SIMILARITY)
    if meant is None and not alike:  # a name in several groups says little
        last_parts = {k.rpartition(".")[2]: k for k in reversed(known)}
        similar = did_you_mean(name, [*last_parts, *aliases], MIN_SIMILARITY)
        if similar in aliases:
            return suggest(similar)
        meant = None if similar is None else last_parts[similar]
    return "" if meant is None else f"; did you mean {meant}?"


def known_keys() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of all keys by dotted name."""
    known = {}
    for group, (_, classes) in GROUPS.items():
        for cls in classes.values():
            for field in dataclasses.fields(cls):
                known[f"{group}.{field.name}"] = field
    for field in dataclasses.fields(DatasetConfig):  # none is built in
        known[f"data.{field.name}"] = field
    return known


def other_names() -> dict[str, str]:
    """Return the names that other programs use for our keys, separated by spaces."""
    return dict(yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text()))
