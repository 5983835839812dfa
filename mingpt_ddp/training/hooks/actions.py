"""Call the hooks of a user's file that act on a run (config/hook_decorators.py), on all ranks."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code, relative_path
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.user_code import check_takes
from mingpt_ddp.data.dataloader import MicroBatch
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.group.json_collectives import refuse_differing_names
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models import eval_mode
from mingpt_ddp.models.dtensor import is_dtensor, local_tensor, whole_tensor
from mingpt_ddp.snapshots.format import HOOKS
from mingpt_ddp.snapshots.hook_state import pack_state, unpack_states
from mingpt_ddp.tasks.evaluation import Evaluation
from mingpt_ddp.tasks.outputs import SUM, Mean, Outputs, as_means, check_outputs
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluation.evaluator import means_of_ranks
from mingpt_ddp.training.hooks.micro_batches import Measured, PassGradients, as_numbers, stack

# The arguments of a hook, by its event.
ARGUMENTS = {
    "gradients": ("step", "gradients"),
    "update": ("step", "weights"),
    "evaluation": ("evaluation",),
}


@dataclass
class Action:
    """A hook of this run that acts on the training."""

    event: str
    registered: Any  # a function, or a class
    hook: Any  # the function, or the instance of this run

    @classmethod
    def new(cls, key: str, registered: Any) -> "Action":
        """
        Args:
            key: Key in the registry. It begins with the event.
            registered: The function or class that the user has registered.
        """
        hook = registered() if isinstance(registered, type) else registered
        return cls(key.split()[0], registered, hook)

    @property
    def has_state(self) -> bool:
        """True if the hook is a class. A function has no state."""
        return isinstance(self.registered, type)

    @property
    def measures(self) -> bool:
        """True if the hook measures the gradients of each micro-batch."""
        return self.has_state and hasattr(self.registered, "micro_batch")

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*ARGUMENTS[self.event], *["micro_batches"] * self.measures)

    @property
    def name(self) -> str:
        """Name of the hook in a snapshot. It does not depend on the hook's file and line."""
        return f"{self.event} {self.registered.__qualname__}"

    @property
    def label(self) -> str:
        """Name of the hook in error messages, with its file and line."""
        function = self.registered.__call__ if self.has_state else self.registered
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f"{relative_path(Path(code.co_filename))}:{code.co_firstlineno}: " if code else ""
        return f"{where}{self.registered.__qualname__} of @acts({self.event!r})"

    def state(self) -> dict[str, Tensor]:
        """Return the state of the hook as tensors of a snapshot. Return {} if it has no state.

        Raises:
            CodeError: The state cannot be saved.
        """
        if not self.has_state:
            return {}
        try:
            with attribute_errors_to_user_code():
                return pack_state(self.name, self.hook.state_dict())
        except CodeError as error:
            raise CodeError(f"{self.label}: {error.args[0]}") from error


# Called with the event, the hook, the arguments of the event and the metrics of the hook.
Watch = Callable[[str, Action | None, tuple[Any, ...], dict[str, Mean]], None]


class Actions:
    """The hooks of this run, called in the order in which the file registers them."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        registered: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            registered: Hooks to call, with their keys in the registry. None to call all registered
                hooks.

        Raises:
            CodeError: A hook does not take the arguments of its event, or two hooks with state have
                the same name.
        """
        self.config = config
        self.runtime = runtime
        if registered is None:
            registered = BUILDERS["action"].items()
        with attribute_errors_to_user_code():
            self.actions = [Action.new(key, hook) for key, hook in registered]
        for action in self.actions:
            check_takes(action.hook, action.arguments, action.label)
            if action.measures:
                label = f"{action.label}: micro_batch"
                check_takes(action.hook.micro_batch, ["gradients"], label)
        names = set[str]()
        for action in self.actions:
            if action.has_state and action.name in names:
                raise CodeError(
                    f"{action.label}: another hook has this name; rename one of the two hooks"
                )
            names.add(action.name)
        # The dry run sets this function to note the effect of each hook. It gets the arguments of
        # the event and the hook's metrics. It is called after each hook of an event, and once
        # before the first one, with None as the hook.
        self.watch: Watch = lambda event, action, values, metrics: None
        # Memory of the most recent step's gradients.
        self._gradient_storages: list[weakref.ref[torch.UntypedStorage]] = []
        # Copy of the hooks' state before the latest step. None if no copy was kept.
        self._state_before_step: dict[str, Tensor] | None = None
        # True if a step was discarded, but no copy of the state before it was kept.
        self._state_is_lost = False
        self._pass_gradients: PassGradients | None = None
        # Measurements of this rank's micro-batches in the most recent passes, by hook.
        self._measured: dict[str, list[Any]] = {}

    # State.

    @property
    def have_state(self) -> bool:
        """True if a hook of this run has state."""
        return any(action.has_state for action in self.actions)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all hooks as tensors of a snapshot. It is the same on every rank."""
        tensors: dict[str, Tensor] = {}
        for action in self.actions:
            tensors |= action.state()
        return tensors

    def tensors(self, model: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Return the state as tensors of a snapshot, by kind. Return {} if no hook has state.

        Raises:
            CodeError: A state cannot be saved, or it shares memory with a weight or gradient, which
                the next step changes.
        """
        if not self.have_state:
            return {}
        held = {
            "weight": [parameter.untyped_storage() for parameter in model.parameters()],
            "gradient": [each for ref in self._gradient_storages if (each := ref()) is not None],
        }
        tensors: dict[str, Tensor] = {}
        for action in self.actions:
            for name, tensor in action.state().items():
                storage = tensor.untyped_storage()
                for kind, storages in held.items():
                    if any(storage is each for each in storages):
                        raise CodeError(
                            f"{action.label} would not resume exactly: its state holds a {kind} "
                            "itself; keep a clone() of it"
                        )
                tensors[name] = tensor
        return {HOOKS: tensors}

    def load(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Make new instances of the hooks, and load the state of each from a snapshot.

        Returns:
            Lines for the log: hooks without a state in the snapshot, and states without a hook.

        Raises:
            SnapshotError: The tensors are not the state of hooks.
            CodeError: `load_state_dict` raises an exception.
        """
        states = unpack_states(tensors, self.runtime.device)
        notes = []
        with attribute_errors_to_user_code():
            for action in filter(lambda action: action.has_state, self.actions):
                action.hook = action.registered()
                if action.name in states:
                    action.hook.load_state_dict(states.pop(action.name))
                else:
                    notes.append(
                        f"no state of the hook {action.name}, which begins with its initial state"
                    )
        notes += [f"state of the hook {name}, which is not registered any more" for name in states]
        self._state_is_lost = False
        return notes

    def discard(self) -> None:
        """Return the hooks to their state before the latest step."""
        if self._state_before_step is not None:
            self.load(self._state_before_step)
        else:
            self._state_is_lost = self.have_state

    def _keep_state(self) -> None:
        """Keep a copy of the state, for a step that may be discarded.

        No copy is kept if a step that fails ends the run.

        Raises:
            ConfigError: A step was discarded although no copy was kept.
        """
        if self._state_is_lost:
            raise ConfigError(
                "TrainStep.discard with a hook that has state needs trainer.on_nonfinite=skip"
            )
        policy = self.config.trainer.on_nonfinite
        # The gradient scaler of fp16 discards steps under any policy.
        if policy != "stop" or self.runtime.scaler.is_enabled():
            self._state_before_step = {
                name: tensor.clone() for name, tensor in self.state().items()
            }

    # Calls.

    def watch_passes(self, model: nn.Module) -> None:
        """Prepare to hold the gradients of each backward pass, if a hook measures them."""
        if any(action.measures for action in self.actions):
            self._pass_gradients = PassGradients(self.runtime.strategy, model)

    def begin_passes(self) -> None:
        """Forget the measurements of earlier passes."""
        self._measured = {action.name: [] for action in self.actions if action.measures}
        if self._pass_gradients is not None:
            self._pass_gradients.clear()

    @torch.no_grad()
    def measure(self, step: int, micro: MicroBatch, loss: Tensor) -> None:
        """Let the hooks measure the gradients of a micro-batch, after its backward pass.

        Args:
            micro: The micro-batch.
            loss: Mean loss of the micro-batch.

        Raises:
            CodeError: A hook raises an exception.
        """
        if self._pass_gradients is None or not micro.scale:
            return  # no hook measures, or the micro-batch only repeats the last one (scale 0)
        scale = self.runtime.scaler.scale(torch.full_like(loss, micro.scale))
        for action in self.actions:
            if action.measures:
                gradients = self._pass_gradients.divided_by(scale)
                key = (step, micro.index)
                measured = self._run(action, action.hook.micro_batch, key, gradients)
                self._measured[action.name].append(measured)
        self._pass_gradients.clear()

    def _gather_measurements(self, action: Action) -> dict[str, Tensor]:
        """Return the measurements of all micro-batches of the step. A collective."""
        group = self.runtime.group
        own: list[Measured] = []
        with group.waiting():  # reading the measurements waits for the GPU
            for measured in self._measured[action.name]:
                own.append(as_numbers(measured, action.label))
        stacked = stack(group.all_gather(own), action.label)
        return {name: each.to(self.runtime.device) for name, each in stacked.items()}

    @torch.no_grad()
    def change_gradients(
        self, step: int, model: nn.Module, taken: Iterable[str] = ()
    ) -> dict[str, Tensor]:
        """Let the hooks change the gradients in place. Return this rank's shares of their metrics.

        Args:
            taken: Metrics of the step so far. A hook must not return one of these names.
        """
        divided = gradients_of(model)
        if self.have_state:
            self._keep_state()
            self._gradient_storages = [
                weakref.ref(each.untyped_storage()) for each in divided.values()
            ]
        if not self.at("gradients"):
            return {}
        gradients = {name: local_tensor(each) for name, each in divided.items()}
        return self._shares("gradients", step, gradients, taken)

    @torch.no_grad()
    def change_weights(
        self, step: int, model: nn.Module, taken: Iterable[str] = ()
    ) -> dict[str, Tensor]:
        """Let the hooks change the weights in place. Return this rank's shares of their metrics.

        Args:
            taken: As in `change_gradients`.
        """
        if not self.at("update"):
            return {}
        weights = {n: local_tensor(p.detach()) for n, p in model.named_parameters()}
        return self._shares("update", step, weights, taken)

    def _shares(
        self, event: str, step: int, tensors: dict[str, Tensor], taken: Iterable[str]
    ) -> dict[str, Tensor]:
        """Call the hooks of an event. Return this rank's shares of their metrics.

        Args:
            tensors: The gradients or weights, which the hooks may change.
            taken: As in `change_gradients`.
        """
        names = {name.removeprefix(SUM) for name in taken}
        metrics = self._call(event, step, names, step, tensors)
        outputs = Outputs({"loss": torch.zeros((), device=self.runtime.device)}, metrics)
        weight = self.runtime.strategy.metric_weight
        shares = outputs.shares(1, copies=1)
        return {name: share * weight for name, share in shares.items() if name != "loss"}

    @torch.no_grad()
    def evaluate(
        self, step: int, model: nn.Module, task: Task, taken: Iterable[str] = ()
    ) -> dict[str, float]:
        """Return the means of the hooks' metrics over all ranks. A collective.

        Args:
            taken: Names of the task's metrics. A hook must not return one of these names.

        Raises:
            CodeError: A hook raises an exception, or returns something that is not a metric, or a
                metric whose name is taken.
            TrainingError: The names of the metrics differ between ranks.
        """
        if not self.at("evaluation"):
            return {}
        with eval_mode(model), self.runtime.autocast():
            evaluation = Evaluation(step, model, task, self.runtime)
            metrics = self._call("evaluation", step, {*taken}, evaluation)
        group = self.runtime.group
        with group.waiting():  # reading the metrics waits for the GPU
            sums_and_counts = {
                name: ([float(total)], float(n)) for name, (total, n) in metrics.items()
            }
        by_rank = group.all_gather(sums_and_counts)
        refuse_differing_names([[*names] for names in by_rank])
        return means_of_ranks(by_rank)

    def at(self, event: str) -> list[Action]:
        """Return the hooks of an event."""
        return [action for action in self.actions if action.event == event]

    def _call(self, event: str, step: int, taken: set[str], *values: Any) -> dict[str, Mean]:
        """Call the hooks of an event, each with random numbers of its own. Return their metrics.

        Args:
            taken: Names of the metrics that exist already. A hook must not return one of these
                names.
            values: Arguments of the hooks.

        Raises:
            CodeError: A hook raises an exception, or returns something that is not a metric, or a
                metric whose name is taken.
        """
        metrics: dict[str, Mean] = {}
        self.watch(event, None, values, {})
        for action in self.at(event):
            if action.measures:
                returned = self._call_measuring(action, step)
            else:
                returned = self._run(action, action.hook, (step,), *values)
            means = as_means(returned or {}, action.label)
            check_outputs(action.label, Outputs({}, means))
            if twice := (taken | metrics.keys()) & means.keys():
                raise CodeError(
                    f"{action.label}: the task or another hook has a metric {min(twice)}, too; "
                    "choose another name"
                )
            metrics |= means
            self.watch(event, action, values, means)
        return metrics

    def _call_measuring(self, action: Action, step: int) -> Any:
        """Call a hook with whole gradients and the measurements of all micro-batches.

        A collective. With fsdp each rank holds only some rows of each gradient. The hook then gets
        a gathered copy, and the rank copies its rows back, with the changes of the hook.
        """
        assert self._pass_gradients is not None
        gradients = gradients_of(self._pass_gradients.model)
        micro_batches = self._gather_measurements(action)
        with self.runtime.group.waiting():
            whole = {name: whole_tensor(each) for name, each in gradients.items()}
        returned = self._run(action, action.hook, (step,), step, whole, micro_batches)
        for name, own in gradients.items():
            if is_dtensor(own):
                own.copy_(self.runtime.strategy.assemble(own, partial(_rows, whole[name])))
        return returned

    def _run(
        self, action: Action, function: Callable[..., Any], key: tuple[int, ...], *values: Any
    ) -> Any:
        """Call a function of a hook, with random numbers of its own.

        Args:
            key: The step, and the micro-batch if there is one. The key, the name of the hook and
                the seed of the run together seed the random numbers.
            values: Arguments of the function.
        """
        group = self.runtime.group
        before = group.heartbeat
        activity = f"in a hook of @acts({action.event!r}), {before['activity']}"
        group.set_activity(activity, self.runtime.strategy.waits_in_passes)
        seed_everything(action.name, self.config.run.seed, *key)
        with attribute_errors_to_user_code():
            returned = function(*values)
        group.set_activity(before["activity"], before["waiting"])
        return returned


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by the name of their parameter. Leave out parameters without one."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return the rows begin .. end - 1."""
    return tensor[begin:end]


def refuse_unfit_hooks(strategy: Strategy) -> None:
    """Refuse hooks that do not work with a strategy.

    A hook with state needs all weights on every rank. A hook that measures micro-batches gets
    gathered gradients, so it may have state even if each rank holds only some rows of the weights.
    It cannot work with synchronized batch normalization.

    Raises:
        ConfigError: A hook does not work. The message names it.
    """
    for key, registered in BUILDERS["action"].items():
        action = Action(key.split()[0], registered, registered)
        sees_all = strategy.weights == "whole" or (action.measures and strategy.weights == "rows")
        if action.has_state and not sees_all:
            raise ConfigError(
                f"{action.label} has state, which needs all weights on every rank; use a function, "
                "or ddp.strategy=ddp or zero1"
            )
        if action.measures and strategy.ddp.sync_batchnorm:
            raise ConfigError(
                f"{action.label} measures each micro-batch, but ddp.sync_batchnorm=true makes one "
                "batch of them; set it to false"
            )
