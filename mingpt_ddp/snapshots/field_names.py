"""Names in snapshots of format 1 that the code spells otherwise; all of them stand here and nowhere else."""

from typing import Any

SWEPT_OVERRIDES = "beside"  # in the hash of an unnamed run: the overrides that a sweep varies
TRAIN_STATE_KEYS = {  # field of TrainState -> key of `position` in state.json
    "wasted_seconds": "lost_seconds",
    "loss_ema": "loss_average",
    "consecutive_skips": "sick_in_a_row",
    "skipped_steps": "passed_over",
}
REMOVED_TRAIN_STATE_KEYS = ("bucket_cap_mb",)


def encode_train_state(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a TrainState by their keys in state.json."""
    return {TRAIN_STATE_KEYS.get(name, name): value for name, value in fields.items()}


def decode_train_state(position: dict[str, Any]) -> dict[str, Any]:
    """Return `position` of a state.json by the fields of TrainState, without keys that have been removed."""
    names = {key: name for name, key in TRAIN_STATE_KEYS.items()}
    return {names.get(k, k): value for k, value in position.items() if k not in REMOVED_TRAIN_STATE_KEYS}
