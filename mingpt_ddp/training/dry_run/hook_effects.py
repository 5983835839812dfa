"""Compare the effects of hooks in the dry run: of a step and its repetition, and of all ranks."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from mingpt_ddp.errors import CodeError
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.tasks.outputs import COUNT, SUM, Mean
from mingpt_ddp.training.hooks.actions import Action

FIRST_STATE = "its first state depends on an earlier run; set it in __init__"
OTHER_STATE = "after load_state_dict(state), state_dict() returns another state"
STATE_IN_PASSES = (
    "micro_batch changes the state, which must be the same on all ranks; return a value"
)
OTHER_RESULT = (
    "the same step again gives another result; keep what it remembers in a class with state_dict "
    "and load_state_dict, and draw random numbers from torch's global generator"
)


class Effect(TypedDict):
    """The effect of a call of a hook on a rank, as JSON values."""

    label: str  # label of the hook; "" for the input of the first hook of an event
    step: int
    metrics: list[str]
    sha256: str  # hash of gradients or weights and the hook's state; "" if bits may vary
    sha256_of_metrics: str  # hash of this rank's shares of the metrics


def effect_of(
    action: Action | None,
    step: int,
    changed: Mapping[str, Tensor],
    metrics: Mapping[str, Mean],
    is_exact: bool,
) -> Effect:
    """Describe the effect of a hook, or the input of the first hook of an event.

    Args:
        action: The hook that was called. None before the first one.
        changed: The gradients or weights.
        is_exact: False if the bits of a step may vary. Then there are no hashes.
    """
    state = action.state() if action else {}
    values: dict[str, Tensor] = {}
    for name, (total, count) in metrics.items():
        values[SUM + name] = torch.as_tensor(total)
        values[COUNT + name] = torch.as_tensor(count)
    return Effect(
        label=action.label if action else "",
        step=step,
        metrics=sorted(metrics),
        sha256=sha256_of_tensors({**changed, **state}) if is_exact else "",
        sha256_of_metrics=sha256_of_tensors(values) if is_exact else "",
    )


def refuse_other_states(states: Mapping[str, str], others: Mapping[str, str], problem: str) -> None:
    """Refuse a hook whose state is not the expected one.

    Args:
        states: SHA-256 of the state of each hook, by its label.

    Raises:
        CodeError: names the hook and the problem.
    """
    for label, digest in states.items():
        if others[label] != digest:
            raise CodeError(f"{label} would not resume exactly: {problem}")


def refuse_another_result(effects: Sequence[Effect], again: Sequence[Effect]) -> None:
    """Refuse the first hook that has another effect when its step is repeated.

    If the gradients or weights differ already before the first hook, no hook is the cause.

    Raises:
        CodeError: names the hook.
    """
    for effect, other in zip(effects, again, strict=True):
        if effect != other:
            if effect["label"]:
                raise CodeError(f"{effect['label']} would not resume exactly: {OTHER_RESULT}")
            return


def refuse_other_effects(by_rank: Sequence[Sequence[Effect]]) -> None:
    """Refuse hooks whose effects differ between ranks.

    The ranks take the same steps. If a rank computes other gradients before any hook has acted, its
    machine is of another kind, and only the names of its metrics are compared.

    Raises:
        CodeError: names a hook and a rank.
    """
    for rank, effects in enumerate(by_rank):
        compares_values = True
        for expected, effect in zip(by_rank[0], effects, strict=True):
            label = expected["label"]
            if differing := sorted({*expected["metrics"]} ^ {*effect["metrics"]}):
                raise CodeError(
                    f"{label} has other metrics on rank {rank} than on rank 0: "
                    f"{', '.join(differing)}; return the same names on every rank"
                )
            if effect["sha256"] == expected["sha256"]:
                continue
            compares_values = compares_values and label != ""
            if compares_values:
                raise CodeError(
                    f"{label} leaves other values on rank {rank} than on rank 0; all ranks must do "
                    "the same"
                )
