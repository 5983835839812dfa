"""Suggest a key for an unknown key, such as a misspelled key or a name from nanoGPT."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.config.validation import did_you_mean, hint_at

# A suggested key of another group must be this similar, because the user's word may have nothing to
# do with any key.
MIN_SIMILARITY = 0.75
# For each name in nanoGPT: our key (with a formula if the values differ), or our group.
NANOGPT_KEYS = {
    "out_dir": "run.root",
    "wandb_log": "tracker",
    "wandb_run_name": "run.name",
    "learning_rate": "optimizer.lr",
    "min_lr": "optimizer.min_lr_ratio = min_lr / optimizer.lr",
    "warmup_iters": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.schedule_steps",
    "decay_lr": "optimizer.schedule",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "max_iters": "trainer.max_steps",
    "gradient_accumulation_steps": "trainer.micro_batch_size = "
    "trainer.batch_size / (ranks x gradient_accumulation_steps)",
    "grad_clip": "trainer.grad_norm_clip",
    "dtype": "trainer.precision",
    "eval_interval": "trainer.eval_every",
    "eval_iters": "trainer.eval_steps",
    "log_interval": "trainer.log_every",
    "always_save_checkpoint": "snapshot.every_steps",
}


def suggest(key: str, chosen: Iterable[str] | None = None) -> str:
    """Return a suggestion for an unknown dotted key, as the end of a message. "" if there is none.

    Args:
        chosen: Names of the keys of the chosen model, optimizer or other component. None to suggest
            keys from all groups.
    """
    known = [*GROUPS, *known_keys()]
    group, _, name = key.rpartition(".")
    if chosen is not None:
        names = [*chosen]
    else:
        names = [k.removeprefix(f"{group}.") for k in known if k.startswith(f"{group}.")]
    if key in known:
        return f" of the chosen {group}"
    if name in NANOGPT_KEYS:
        return f"; did you mean {NANOGPT_KEYS[name]}?"
    alike = [other for other in known if other.endswith(f".{name}")]
    if alike and (not group or group in GROUPS or len(alike) == 1):
        return f"; did you mean {alike[0]}?"
    if names:
        return f"; {hint_at(name, names, f'{group}.')}"
    meant = did_you_mean(key, known, MIN_SIMILARITY)
    # If several groups have a key with this name, suggest none of them.
    if meant is None and not alike:
        by_name = NANOGPT_KEYS | {k.rpartition(".")[2]: k for k in reversed(known)}
        similar = did_you_mean(name, by_name, MIN_SIMILARITY)
        meant = None if similar is None else by_name[similar]
    return "" if meant is None else f"; did you mean {meant}?"


def known_keys() -> dict[str, dataclasses.Field[Any]]:
    """Return the dataclass field of each key, by dotted name."""
    known = {}
    for group, (_, classes) in GROUPS.items():
        for cls in classes.values():
            for field in dataclasses.fields(cls):
                known[f"{group}.{field.name}"] = field
    for field in dataclasses.fields(DatasetConfig):  # no dataset is built in
        known[f"data.{field.name}"] = field
    return known
