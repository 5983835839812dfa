"""Compare the effects of hooks in the dry run.

A hook must have the same effect when a step is repeated, and the same effect on all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from mingpt_ddp.errors import CodeError
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.tasks.outputs import COUNT, SUM, Mean
from mingpt_ddp.training.hooks.actions import Action

# Problems of a hook, as error messages name them.
INITIAL_STATE_DIFFERS = "its initial state depends on an earlier run; set the state in __init__"
LOADED_STATE_DIFFERS = "after load_state_dict(state), state_dict() returns a different state"
STATE_CHANGED_IN_PASSES = (
    "micro_batch changes the hook's state, which must be the same on all ranks; return a value "
    "instead"
)
RESULT_DIFFERS = (
    "a repeated step gives a different result; keep the hook's memory in a class with state_dict "
    "and load_state_dict, and draw random numbers from torch's global generator"
)


class Effect(TypedDict):
    """The effect of a call of a hook on a rank, as JSON values."""

    label: str  # label of the hook; "" for the input of the first hook of an event
    step: int
    metrics: list[str]
    # Hash of the gradients or weights and the hook's state. "" if a repeated step may have
    # different last bits.
    sha256: str
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
        is_exact: False if a repeated step may have different last bits. Then there are no hashes.
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


def refuse_different_states(
    expected: Mapping[str, str], actual: Mapping[str, str], problem: str
) -> None:
    """Refuse a hook whose state differs from the expected one.

    Args:
        expected: SHA-256 of the expected state of each hook, by its label.
        actual: SHA-256 of the actual state of each hook, by its label.
        problem: The part of the error message that explains the difference.

    Raises:
        CodeError: The message names the hook and the problem.
    """
    for label, digest in expected.items():
        if actual[label] != digest:
            raise CodeError(f"{label} would not resume exactly: {problem}")


def refuse_different_result(effects: Sequence[Effect], repeated: Sequence[Effect]) -> None:
    """Refuse the first hook that has a different effect when its step is repeated.

    If the gradients or weights already differ before the first hook is called, no hook is the
    cause.

    Args:
        effects: Effects of the hooks in the step.
        repeated: Effects of the hooks when the step was repeated.

    Raises:
        CodeError: The message names the hook.
    """
    for effect, repeated_effect in zip(effects, repeated, strict=True):
        if effect != repeated_effect:
            if effect["label"]:
                raise CodeError(f"{effect['label']} would not resume exactly: {RESULT_DIFFERS}")
            return


def refuse_different_effects(by_rank: Sequence[Sequence[Effect]]) -> None:
    """Refuse hooks whose effects differ between ranks.

    The ranks take the same steps. If a rank computes different gradients before any hook has acted,
    its hardware differs, and only the names of its metrics are compared.

    Raises:
        CodeError: The message names a hook and a rank.
    """
    for rank, effects in enumerate(by_rank):
        compares_values = True
        for expected, effect in zip(by_rank[0], effects, strict=True):
            label = expected["label"]
            if differing := sorted({*expected["metrics"]} ^ {*effect["metrics"]}):
                raise CodeError(
                    f"{label} returns other metrics on rank {rank} than on rank 0: "
                    f"{', '.join(differing)}; return the same names on every rank"
                )
            if effect["sha256"] == expected["sha256"]:
                continue
            compares_values = compares_values and label != ""
            if compares_values:
                raise CodeError(
                    f"{label} leaves other values on rank {rank} than on rank 0; make the "
                    "same changes on every rank"
                )
