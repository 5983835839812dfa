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
            if total is None:
                total = log_probabilities
            else:
                total = torch.logaddexp(total, log_probabilities)
        assert total is not None
        return total - math.log(len(self.models))


def why_not_averaged(states: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """Return why the models of these snapshots do not predict the same; None if they do.

    They do if they predict the same items from the same inputs.

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
            differing = [key for key in keys if _differs(key, state, expected)]
            context = state["config"]["data"].get("block_size")
            expected_context = expected["config"]["data"].get("block_size")
        except (LookupError, TypeError, AttributeError) as error:
            raise SnapshotError(f"the snapshot of {name} has an invalid state") from error
        if any(key in DATA for key in differing):
            raise SnapshotError(
                f"{name} has other data than {first}; measure it alone, or all on a text: "
                "data.path=..."
            )
        if context != expected_context:
            differing.append("block_size")
        if differing and reason is None:
            differences = " and another ".join(differing)
            reason = f"{name} cannot be averaged with {first}: it has another {differences}"
    return reason


def _differs(key: str, state: Any, expected: Any) -> bool:
    if key in DATA:
        return bool(state[key]["sha256"] != expected[key]["sha256"])
    return bool(state.get(key) != expected[key])
