"""Register hooks: functions of a user that a run calls, and that may act on the run."""

from collections.abc import Callable
from typing import Any, TypeVar

from mingpt_ddp.config.builders import BUILDERS, Registration, add_registration

Hook = TypeVar("Hook", bound=Callable[..., Any])
OBSERVED_EVENTS = ("step", "evaluate", "end")
ACTING_EVENTS = ("gradients", "update", "evaluation")
# Methods that a class must have if it is registered with `acts`.
METHODS = ("__call__", "state_dict", "load_state_dict")


def on(event: str) -> Callable[[Hook], Hook]:
    """Return a decorator that registers a hook: a function that observes a run.

    The run calls the hook with the arguments of the event. A hook cannot change the run.

    Args:
        event: The event that calls the hook:
            "step": at every log line, with (step, metrics).
            "evaluate": after every evaluation, with (step, metrics of the validation split).
            "end": at the end, with (result,), the content of result.json.

    Raises:
        ValueError: The event is unknown, or it has another hook with the same name.
    """
    return _decorator("on", "hook", event, OBSERVED_EVENTS)


def acts(event: str) -> Callable[[Hook], Hook]:
    """Return a decorator that registers a hook that acts on a run. All ranks call it.

    A hook may return metrics by name, as a task's `loss` does. An exception ends the run. With fsdp
    and tensor parallelism, each tensor that a hook gets is the shard of this rank.

    To keep state, decorate a class. Each run makes one instance, without arguments, and calls it.
    The class has two more methods. `state_dict()` returns a flat dictionary of tensors, numbers and
    text, which is the same on all ranks. `load_state_dict(state)` gets it back, with tensors on the
    run's device.

    A class for "gradients" may also have the method `micro_batch(gradients)`. It is called after
    the backward pass of each micro-batch, on the rank that ran the micro-batch. Its argument has
    copies of the gradients of the micro-batch's mean loss, by parameter, before ranks average them.
    It returns a dictionary of small tensors, and must not change the state of the instance.
    `__call__` then takes (step, gradients, micro_batches). `micro_batches` is a dictionary that is
    the same on all ranks. For each name that `micro_batch` returned, it has one fp64 tensor of
    shape (number of micro-batches, ...), in the order of the micro-batches.

    Args:
        event: The event that calls the hook:
            "gradients": after the passes of a step and before the clipping, with (step, gradients).
            The gradients, by parameter, are averaged over the ranks and do not contain the loss
            scale. The hook may change them in place.
            "update": after the optimizer, with (step, weights). The hook may change the weights, by
            parameter, in place.
            "evaluation": after the validation split is evaluated, with (evaluation,), a
            `mingpt_ddp.tasks.evaluation.Evaluation`.

    Raises:
        ValueError: The event is unknown, or it has another hook with the same name.
        TypeError: The hook is neither a function nor a class with the methods above.
    """
    add = _decorator("acts", "action", event, ACTING_EVENTS)

    def check_and_add(hook: Hook) -> Hook:
        if not hasattr(hook, "__qualname__"):
            raise TypeError(f"@acts({event!r}) takes a function or a class, not {hook!r:.100}")
        if isinstance(hook, type):
            missing = [method for method in METHODS if method not in dir(hook)]
            if missing:
                raise TypeError(
                    f"@acts({event!r}): the class {hook.__name__} does not have {missing[0]}; it "
                    f"needs {', '.join(METHODS)}"
                )
            if event != "gradients" and hasattr(hook, "micro_batch"):
                raise TypeError(
                    f"@acts({event!r}): the class {hook.__name__} has a method micro_batch, which "
                    'only @acts("gradients") calls'
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
                f"@{name}({event!r}) has two hooks named {hook.__qualname__}; rename one of them"
            )
        add_registration(Registration(kind, key, None, hook))
        return hook

    return add
