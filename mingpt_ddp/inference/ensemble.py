"""An ensemble: the mean of the probabilities that several models give."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import SnapshotError


class Ensemble(nn.Module):
    """Return the logarithm of the mean of the models' probabilities, which are logits again."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | None = None  # of one model's size, however many there are
        for model in self.models:
            log_probabilities = model(x).float().log_softmax(dim=-1)
            total = log_probabilities if total is None else torch.logaddexp(total, log_probabilities)
        assert total is not None
        return total - math.log(len(self.models))


def check_same_outputs(states: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse snapshots whose models do not predict the same items from the same inputs.

    Args:
        states: by the name of the snapshot, untrusted.
        keys: of a state, which describe the data and its tokens.

    Raises:
        SnapshotError: names the one that differs from the first, and how.
    """
    (first, expected), *others = states.items()
    for name, state in others:
        try:
            differing = [key for key in keys if state.get(key) != expected[key]]
            contexts = [each["config"]["data"].get("block_size") for each in (expected, state)]
        except (LookupError, TypeError, AttributeError) as error:
            raise SnapshotError(f"the snapshot of {name} has an invalid state") from error
        differing += ["block_size"] if contexts[0] != contexts[1] else []
        if differing:
            raise SnapshotError(
                f"{name} cannot be averaged with {first}: it has another {' and another '.join(differing)}; give runs "
                "of the same data, tokenizer and context length"
            )
