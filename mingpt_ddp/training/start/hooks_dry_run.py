"""Try the hooks that act, on all ranks, before anything is written."""

from typing import Any, TypedDict

import torch
from torch import Tensor

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.tasks.outputs import COUNT, SUM
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.hooks.actions import Action, Actions
from mingpt_ddp.training.trainable import build_trainable


class Outcome(TypedDict):
    """What a hook has left on a rank: JSON values."""

    label: str
    event: str
    metrics: list[str]
    sha256: str  # of the gradients or weights, and of its state
    sha256_of_metrics: str  # of this rank's shares


def check_actions(
    runtime: Runtime, task: Task, gradients: dict[str, Tensor] | None, taken: dict[str, list[str]]
) -> None:
    """Call each hook for two steps, then for the second one again, from its restored state.

    All ranks get the same gradients and weights, and must leave the same. A collective.

    Args:
        gradients: of a step, on the CPU of rank zero; None on the others.
        taken: the names of the task's metrics, in "train"ing and of "val"idation.

    Raises:
        CodeError: a hook raises an exception, returns a metric that is none or is taken, does not
            resume exactly, or does other things on other ranks; names it and, where it can, file
            and line.
        ConfigError: a hook has state, and no rank holds all weights.
    """
    group = runtime.group
    received = group.broadcast_tensors(gradients)

    def try_all() -> list[Outcome]:
        dry_run = _DryRun(runtime, task, received)
        with attribute_errors_to_user_code():
            outcomes = [dry_run.check(key, hook) for key, hook in BUILDERS["action"].items()]
        _refuse_twice(outcomes, taken)
        return outcomes

    group.decide_on_rank_zero(try_all, refuse_differences)


class _DryRun:
    """A model with weights and gradients that are the same for each hook."""

    def __init__(self, runtime: Runtime, task: Task, gradients: dict[str, Tensor]) -> None:
        self.runtime = runtime.alone()
        self.holds_all_weights = runtime.strategy.holds_all_weights
        # Otherwise the order of a GPU's sums varies.
        is_cpu = runtime.device.type == "cpu"
        self.is_exact = is_cpu or task.config.trainer.deterministic
        self.task = task
        self.model = build_trainable(self.runtime, task).model
        self.weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.gradients = gradients

    def check(self, key: str, hook: Any) -> Outcome:
        """Return what a hook leaves, the same when it is called again from its restored state.

        Args:
            key: of the registry.

        Raises:
            CodeError, ConfigError: as `check_actions`.
        """
        first = Actions(self.task.config, self.runtime, [(key, hook)])
        [action] = first.actions
        if action.has_state and not self.holds_all_weights:
            raise ConfigError(
                f"{action.label} has state, which needs all weights on every rank; use a function, "
                "or ddp.strategy=ddp or zero1"
            )
        fresh = sha256_of_tensors(first.state())
        outcome = self._call(first, action, 1)
        if action.event == "evaluation" and not action.has_state:
            return outcome  # it may take long
        saved = {name: tensor.clone() for name, tensor in first.state().items()}
        end = self._call(first, action, 2)
        second = Actions(self.task.config, self.runtime, [(key, hook)])
        if sha256_of_tensors(second.state()) != fresh:
            raise CodeError(
                f"{action.label} would not resume exactly: its first state depends on an earlier "
                "run; set it in __init__"
            )
        second.load(saved)
        if sha256_of_tensors(second.state()) != sha256_of_tensors(saved):
            raise CodeError(
                f"{action.label} would not resume exactly: after load_state_dict(state), "
                "state_dict() returns another state"
            )
        again = self._call(second, action, 2)
        if self.is_exact and again != end:
            raise CodeError(
                f"{action.label} would not resume exactly: the same step again gives another "
                "result; keep what it remembers in a class with state_dict and load_state_dict, "
                "and draw random numbers from torch's global generator"
            )
        return end

    def _call(self, actions: Actions, action: Action, step: int) -> Outcome:
        """Call a hook; return what it leaves."""
        metrics: dict[str, Any]
        changed: dict[str, Tensor] = {}
        if action.event == "evaluation":
            metrics = actions.evaluate(step, self.model, self.task)
        else:
            self._reset(step)
            named = dict(self.model.named_parameters())
            if action.event == "gradients":
                metrics = actions.change_gradients(step, self.model)
                changed = {n: p.grad for n, p in named.items() if p.grad is not None}
            else:
                metrics = actions.change_weights(step, self.model)
                changed = {n: p.detach() for n, p in named.items()}
        self._refuse_alias(action)
        sha256 = sha256_of_tensors(changed | actions.state()) if self.is_exact else ""
        names = {name.removeprefix(SUM).removeprefix(COUNT) for name in metrics}
        values = {name: torch.as_tensor(value) for name, value in metrics.items()}
        return Outcome(
            label=action.label,
            event=action.event,
            metrics=sorted(names),
            sha256=sha256,
            sha256_of_metrics=sha256_of_tensors(values) if self.is_exact else "",
        )

    def _refuse_alias(self, action: Action) -> None:
        """Refuse a state that has the storage of a weight or gradient: the next step changes it.

        Raises:
            CodeError: names the hook.
        """
        state_storages = {each.untyped_storage().data_ptr() for each in action.state().values()}
        for parameter in self.model.parameters():
            for kind, tensor in (("weight", parameter), ("gradient", parameter.grad)):
                if tensor is not None and tensor.untyped_storage().data_ptr() in state_storages:
                    raise CodeError(
                        f"{action.label} would not resume exactly: its state holds a {kind} "
                        "itself; keep a clone() of it"
                    )

    @torch.no_grad()
    def _reset(self, step: int) -> None:
        """Set the weights and gradients of a step in place, as training does."""
        for (name, parameter), weights in zip(
            self.model.named_parameters(), self.weights, strict=True
        ):
            parameter.copy_(weights).div_(step)
            gradient = self.gradients.get(name)
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient).div_(step)


def _refuse_twice(outcomes: list[Outcome], taken: dict[str, list[str]]) -> None:
    """Refuse hooks that return a metric of the task or of another hook.

    Raises:
        CodeError: names the metric.
    """
    names = {event: {*names_of_event} for event, names_of_event in taken.items()}
    for outcome in outcomes:
        known = names["val" if outcome["event"] == "evaluation" else "train"]
        if twice := known & {*outcome["metrics"]}:
            raise CodeError(
                f"{outcome['label']}: the task or another hook has a metric {min(twice)}, too"
            )
        known |= {*outcome["metrics"]}


def refuse_differences(by_rank: list[list[Outcome]]) -> None:
    """Refuse hooks that do not leave the same on all ranks.

    Raises:
        CodeError: names one and a rank.
    """
    for rank, outcomes in enumerate(by_rank):
        for expected, outcome in zip(by_rank[0], outcomes, strict=True):
            label = expected["label"]
            if differing := sorted({*expected["metrics"]} ^ {*outcome["metrics"]}):
                raise CodeError(
                    f"{label} has other metrics on rank {rank} than on rank 0: "
                    f"{', '.join(differing)}; return the same names on every rank"
                )
            if outcome["sha256"] != expected["sha256"]:
                raise CodeError(
                    f"{label} leaves other values on rank {rank} than on rank 0; all ranks must do "
                    "the same"
                )
