"""An ensemble: the mean of the probabilities that several models give."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import SnapshotError

DATA = ("text", "data")  # keys of a state with the SHA-256 of the data


class Ensemble(nn.Module):
    """Return the logarithm of the mean of the models' probabilities, which are logits again."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | None = None  # of one model's size, however many there are
        for model in self.models:
            log_probabilities = model(x).float().log_softmax(dim=-1)
            total = (
                log_probabilities if total is None else torch.logaddexp(total, log_probabilities)
            )
        assert total is not None
        return total - math.log(len(self.models))


def why_not_averaged(states: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """Return why the models of these snapshots do not predict the same items from the same inputs;
    None if they do.

    Args:
        states: by the name of the snapshot, untrusted.
        keys: of a state, which describe the data and its tokens.

    Raises:
        SnapshotError: a state is invalid, or its run had other data than the first, if `keys` has
            "text" or "data".
    """
    (first, expected), *others = states.items()
    reason = None
    for name, state in others:
        try:
            data = [
                key
                for key in keys
                if key in DATA and state[key]["sha256"] != expected[key]["sha256"]
            ]
            differing = [key for key in keys if key not in DATA and state.get(key) != expected[key]]
            contexts = [each["config"]["data"].get("block_size") for each in (expected, state)]
        except (LookupError, TypeError, AttributeError) as error:
            raise SnapshotError(f"the snapshot of {name} has an invalid state") from error
        if data:
            raise SnapshotError(
                f"{name} has other data than {first}; measure it alone, or all on a text: "
                "data.path=..."
            )
        differing += ["block_size"] if contexts[0] != contexts[1] else []
        if differing and reason is None:
            reason = (
                f"{name} cannot be averaged with {first}: it has another "
                f"{' and another '.join(differing)}"
            )
    return reason
