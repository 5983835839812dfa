"""Suggest the key that an unknown key was meant to be, including the names of nanoGPT, Lightning
and Hugging Face.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mingpt_ddp.config.fields import describe
from mingpt_ddp.config.schema import GROUPS
from mingpt_ddp.config.validation import did_you_mean, hint_at

# What a key of ours is, where another program's has another meaning.
FORMULAS = {
    "gradient_accumulation_steps": "trainer.batch_size / (ranks x gradient_accumulation_steps)",
    "accumulate_grad_batches": "trainer.batch_size / (ranks x accumulate_grad_batches)",
    "min_lr": "min_lr / optimizer.lr",
    "warmup_ratio": "warmup_ratio x steps",
}


def suggest(key: str, chosen: Iterable[str] | None = None) -> str:
    """Return a suggestion for an unknown dotted key: from its group if that is known, else from all
    keys.

    Args:
        chosen: the names of the keys in its group, if the group is known.
    """
    known = known_keys()
    group, _, name = key.rpartition(".")
    names = (
        [k.removeprefix(f"{group}.") for k in known if k.startswith(f"{group}.")]
        if chosen is None
        else [*chosen]
    )
    if key in known:
        return f" of the chosen {group}"
    theirs = {word: k for k, words in other_names().items() for word in words.split()}
    ours = theirs.get(key) or theirs.get(name)
    if ours and (
        not names or not ours.startswith(f"{group}.") or ours.removeprefix(f"{group}.") in names
    ):
        # the unit may differ
        meaning = f" ({describe(known[ours].metadata)})" if ours in known else ""
        formula = f" = {FORMULAS[name]}" if name in FORMULAS else ""
        return f"; did you mean {ours}{meaning}{formula}?"
    if same_name := [k for k in known if k.endswith(f".{name}")]:
        return f"; did you mean {same_name[0]}?"
    if names:
        return f"; {hint_at(name, names, f'{group}.')}"
    last_parts = {k.rpartition(".")[2]: k for k in reversed(known)}
    similar = did_you_mean(name, last_parts)
    meant = did_you_mean(key, [*GROUPS, *known]) or (last_parts[similar] if similar else None)
    return f"; did you mean {meant}?" if meant else ""


def known_keys() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of all keys by dotted name."""
    classes = [(group, cls) for group, (_, choices) in GROUPS.items() for cls in choices.values()]
    return {
        f"{group}.{field.name}": field
        for group, cls in classes
        for field in dataclasses.fields(cls)
    }


def other_names() -> dict[str, str]:
    """Return the names that other programs use for our keys, separated by spaces."""
    return dict(yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text()))
