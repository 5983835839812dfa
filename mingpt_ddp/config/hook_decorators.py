"""Register the hooks of a user's file: observers, and those that act on a run."""

from collections.abc import Callable
from typing import Any, TypeVar

from mingpt_ddp.config.builders import BUILDERS, Registration, add_entry

Hook = TypeVar("Hook", bound=Callable[..., Any])
EVENTS = ("step", "evaluate", "end")
ACTIONS = ("gradients", "update", "evaluation")
METHODS = ("__call__", "state_dict", "load_state_dict")  # of a class that acts


def on(event: str) -> Callable[[Hook], Hook]:
    """Register a hook, as a decorator: a function that is called during a run and cannot change it.

    Args:
        event: "step", at every line of the log: (step, metrics); "evaluate": (step, metrics of the
            validation split); "end": (result,), the content of result.json.

    Raises:
        ValueError: an unknown event, or another hook of it has the name.
    """
    return _decorator("on", "hook", event, EVENTS)


def acts(event: str) -> Callable[[Hook], Hook]:
    """Register a hook that acts, as a decorator: a function that all ranks call in every step.

    To keep state, decorate a class instead. Each run makes one instance, without arguments, and
    calls it. The class has `state_dict()`, which returns a flat dictionary of tensors, numbers and
    text, the same on all ranks, and `load_state_dict(state)`, which gets tensors on the run's
    device.
    A class of "gradients" may also have `micro_batch(gradients)`. It is called after the backward
    pass of each micro-batch, on the rank that ran it. It gets copies of the gradients of the mean
    loss of this micro-batch, by parameter, before they are averaged. It returns a dictionary of
    small tensors, and must not change the state. `__call__` then takes (step, gradients,
    micro_batches). The last one is a dictionary that is the same on all ranks. For each name that
    `micro_batch` returned, it has one fp64 tensor (number of micro-batches, ...), in the order of
    the micro-batches.
    A hook may return metrics by name, as a task's `loss` does. An exception ends the run.

    Args:
        event: "gradients", after the passes and before the clipping: (step, gradients), averaged
            over the ranks and without the loss scale, by parameter, to be changed in place;
            "update", after the optimizer: (step, weights), by parameter, to be changed in place;
            "evaluation", of the validation split: (evaluation,), a
            `mingpt_ddp.tasks.evaluation.Evaluation`.
            With fsdp and tensor parallelism a tensor holds this rank's shard.

    Raises:
        ValueError: an unknown event, or another hook of it has the name.
        TypeError: neither a function nor such a class.
    """
    add = _decorator("acts", "action", event, ACTIONS)

    def check_and_add(hook: Hook) -> Hook:
        if not hasattr(hook, "__qualname__"):
            raise TypeError(f"@acts({event!r}) takes a function or a class, not {hook!r:.100}")
        if isinstance(hook, type):
            missing = [method for method in METHODS if method not in dir(hook)]
            if missing:
                raise TypeError(
                    f"@acts({event!r}): the class {hook.__name__} has no {missing[0]}; it needs "
                    f"{', '.join(METHODS)}"
                )
            if event != "gradients" and hasattr(hook, "micro_batch"):
                raise TypeError(
                    f"@acts({event!r}): the class {hook.__name__} has a method micro_batch, which "
                    'is called for @acts("gradients") alone'
                )
        added: Hook = add(hook)
        return added

    return check_and_add


def _decorator(name: str, kind: str, event: str, events: tuple[str, ...]) -> Any:
    if event not in events:
        raise ValueError(f"@{name}({event!r}): the event must be one of {', '.join(events)}")

    def add(hook: Hook) -> Hook:
        key = f"{event} {hook.__module__}.{hook.__qualname__}"
        if BUILDERS[kind].get(key, hook) is not hook:
            raise ValueError(
                f"@{name}({event!r}) has two hooks {hook.__qualname__}; give them two names"
            )
        add_entry(Registration(kind, key, None, hook))
        return hook

    return add
