"""Suggest the key that an unknown key was meant to be, including the names of nanoGPT, Lightning and Hugging Face."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import yaml

from mingpt_ddp.config.fields import describe
from mingpt_ddp.config.schema import GROUPS
from mingpt_ddp.config.validation import did_you_mean, hint_at


def suggest(key: str, chosen: Iterable[str] | None = None) -> str:
    """Return a suggestion for an unknown dotted key: from its group if that is known, else from all keys.

    Args:
        chosen: the names of the keys in its group, if the group is known.
    """
    classes = [(group, cls) for group, (_, choices) in GROUPS.items() for cls in choices.values()]
    known = {f"{group}.{field.name}": field for group, cls in classes for field in dataclasses.fields(cls)}
    group, _, name = key.rpartition(".")
    names = [k.removeprefix(f"{group}.") for k in known if k.startswith(f"{group}.")] if chosen is None else [*chosen]
    if key in known:
        return f" of the chosen {group}"
    ours = {theirs: k for k, words in other_names().items() for theirs in words.split()}.get(name)
    if ours and (not names or not ours.startswith(f"{group}.") or ours.removeprefix(f"{group}.") in names):
        meaning = f" ({describe(known[ours].metadata)})" if ours in known else ""  # the unit may differ
        return f"; did you mean {ours}{meaning}?"
    if same_name := [k for k in known if k.endswith(f".{name}")]:
        return f"; did you mean {same_name[0]}?"
    if names:
        return f"; {hint_at(name, names, f'{group}.')}"
    meant = did_you_mean(key, [*GROUPS, *known])
    return f"; did you mean {meant}?" if meant else ""


def other_names() -> dict[str, str]:
    """Return the names that other programs use for our keys, separated by spaces."""
    return dict(yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text()))
