"""DryRun steps before anything is written: user code must resume exactly."""

from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.model_config import model_label
from mingpt_ddp.data.dataloader import BatchPlan, Loader, MicroBatch
from mingpt_ddp.distributed.device.compile import check_compiles
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models import flops_per_token
from mingpt_ddp.optim.lr_schedule import check_schedule
from mingpt_ddp.snapshots import state_dict
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.snapshots.staging_buffer import encode_header, header_of
from mingpt_ddp.tasks.outputs import Mean, check_outputs, outputs_of
from mingpt_ddp.tasks.task import Task, check_metrics
from mingpt_ddp.training.hooks.actions import Action
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.saves.resume import restore
from mingpt_ddp.training.start.hook_effects import (
    FIRST_STATE,
    OTHER_STATE,
    Effect,
    effect_of,
    refuse_another_result,
    refuse_divided_state,
    refuse_other_effects,
    refuse_other_states,
)
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

MIN_AVERAGED_BYTES = 4  # per number: 16 bits do not resolve the small steps of an average
DRY_RUN_MICRO_BATCHES = 2  # at most: the second shows that gradients accumulate


def check_user_code(runtime: Runtime, task: Task, loader: Loader, plan: BatchPlan) -> None:
    """Try the user's code: rank zero alone, or all ranks if there are hooks that act.

    All ranks then take the same steps, with rank zero's batch. A collective.

    Raises:
        CodeError, ConfigError: as `check_parts` and `check_resumes_exactly`.
    """
    group = runtime.group
    trial = DryRun(runtime, task, loader)

    @cache
    def batch() -> list[MicroBatch]:
        return loader.get_batch(1, plan, 0)

    names = group.run_on_rank_zero(lambda: check_parts(trial, batch()))

    def take_steps() -> list[Effect]:
        return check_resumes_exactly(trial, batch(), names)

    if BUILDERS["action"]:
        group.decide_on_rank_zero(take_steps, refuse_other_effects)
    else:
        group.run_on_rank_zero(take_steps)


@dataclass(frozen=True)
class DryRun:
    """The run, its task and its data, which all trial steps share."""

    runtime: Runtime
    task: Task
    loader: Loader

    def few(self, batch: list[MicroBatch]) -> list[Any]:
        """Return small parts of a step's micro-batches, on the device. They suffice for trials."""
        task = self.task
        few = batch[:DRY_RUN_MICRO_BATCHES]
        return [task.trial_batch(self.runtime.to_device(micro.batch)) for micro in few]

    @property
    def is_exact(self) -> bool:
        """Return True if a repeated step has the same bits. On a GPU the order of sums varies."""
        is_cpu = self.runtime.device.type == "cpu"
        return is_cpu or bool(self.task.config.trainer.deterministic)


def check_resumes_exactly(
    trial: DryRun, batch: list[MicroBatch], val_metrics: list[str]
) -> list[Effect]:
    """Train some steps, restore the state before the last, and compare the last bit for bit.

    The last step runs twice: in the objects that took the first steps, and in fresh ones with the
    restored state. It follows an odd number of steps, three: an optimizer that acts at every second
    step, and keeps its own count, then acts differently in fresh objects. Hooks are called as in
    training. Hooks of evaluations are called after the third step, and again after the last step if
    one of them has state.

    Args:
        batch: the micro-batches of one rank in a step, on the CPU.
        val_metrics: names of the task's metrics of the validation split.

    Returns:
        The effect of each call of a hook, to compare between ranks.

    Raises:
        CodeError: the code raises, returns the wrong type or shape, or does not resume exactly.
        ConfigError: a parameter gets no gradient, which DDP would wait for.
    """
    task = trial.task
    few = trial.few(batch)
    with attribute_errors_to_user_code():
        first = _DryRun(trial, few, val_metrics)
        fresh = first.digest()
        first_states = first.hook_states()
        first.step(1)
        trainable = first.trainable
        state_dict.check_savable(
            trainable.model,
            trainable.optimizer,
            by_rows=trial.runtime.strategy.weights == "rows",
        )
        first.step(2)
        first.step(3)
        first.evaluate(3)
        saved = first.copy()
        saved_states = first.hook_states()
        loss = first.step(4)
        first.evaluate(4, again=True)
        end = first.digest()
        effects = first.effects
        del first, trainable
        second = _DryRun(trial, few, val_metrics)
        refuse_other_states(first_states, second.hook_states(), FIRST_STATE)
        if fresh != second.digest():
            raise _not_exact(f"model {model_label(task.config.model)}", "first weights depend")
        second.load(saved)
        refuse_other_states(saved_states, second.hook_states(), OTHER_STATE)
        again = second.step(4)
        second.evaluate(4, again=True)
        if trial.is_exact:
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise _not_exact(f"model {model_label(task.config.model)}", "loss depends")
            last = [effect for effect in effects if effect["step"] == 4]
            refuse_another_result(last, second.effects)
            if end != second.digest():
                raise _not_exact(f"optimizer {task.config.optimizer.name}", "step depends")
        task.check_model(second.trainable.model, few[0], trained=True)
    return effects


def check_parts(trial: DryRun, batch: list[MicroBatch]) -> list[str]:
    """Check hooks, schedule, what a model returns and can be saved as, and if it compiles.

    Args:
        batch: the micro-batches of one rank in a step, on the CPU.

    Returns:
        Names of the task's metrics of the validation split.

    Raises:
        CodeError: the code raises, or returns the wrong type or shape.
        ConfigError: a hook has state, and no rank holds all weights.
    """
    refuse_divided_state(trial.runtime)
    config = trial.task.config
    with attribute_errors_to_user_code():
        length = RunLength(config, trial.loader.steps_per_epoch)
        steps = length.known_steps or config.optimizer.schedule_steps or 1
        check_schedule(config.optimizer, steps)
        whole = trial.runtime.to_device(batch[0].batch)
        return _check_model(trial.runtime, trial.task, whole, trial.few(batch)[0])


def _check_model(runtime: Runtime, task: Task, batch: Any, part: Any) -> list[str]:
    """Check what a user's model returns, what it can be saved as, and whether it compiles.

    Return the names of the task's metrics of the validation split.

    Args:
        batch: The batch of one micro-batch, on the device.
        part: The part of it that trial steps use.
    """
    config = task.config
    trainable = build_trainable(runtime.alone(), task)
    model = trainable.model
    flops_per_token(model)
    state_dict.check_savable(model, trainable.optimizer)
    if config.trainer.ema is not None:
        _check_averaged(model, config.trainer.ema)
    runtime.strategy.check_model(model)
    with runtime.autocast():
        task.check_model(model, batch, trained=False)
        outputs = outputs_of(task.loss(model, part), model)
        check_outputs(f"the model {model_label(config.model)}", outputs)
        check_metrics(config.task.name, outputs.losses | outputs.metrics)
        measured = task.metrics(model, part)
    if runtime.compiles:
        check_compiles(model, config, lambda model: task.loss(model, part))
    return [*measured]


def _check_averaged(model: nn.Module, decay: float) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize < MIN_AVERAGED_BYTES:
            raise ConfigError(f"trainer.ema={decay} needs {name} in fp32; average it in your model")


def _not_exact(part: str, depends: str) -> CodeError:
    return CodeError(
        f"the {part} would not resume exactly: its {depends} on more than the snapshot and torch's "
        "seed; keep its state in parameters, buffers or optimizer.state, and draw random numbers "
        "from torch's global generator"
    )


class _SameBatchLoader:
    """The same few micro-batches in every step."""

    def __init__(self, loader: Loader, batches: list[Any]) -> None:
        """
        Args:
            batches: of one micro-batch each, on the device.
        """
        self.steps_per_epoch = loader.steps_per_epoch
        self.items_per_step = loader.items_per_step
        self.batch = [MicroBatch(index, each) for index, each in enumerate(batches)]

    def get_batch(self, step: int, plan: BatchPlan, rank: int) -> list[MicroBatch]:
        return self.batch

    def close(self) -> None:
        """Release nothing."""


class _GradientCheck:
    """Refuse a model of which some parameters have no gradient in a micro-batch."""

    def __init__(self, model: nn.Module, config: Config, micro_batches: int) -> None:
        self.config = config
        self.micro_batches = micro_batches
        self.counts: dict[str, int] = {}  # gradients of this step, by parameter
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.counts[name] = 0
                parameter.register_post_accumulate_grad_hook(partial(self._count, name))

    def _count(self, name: str, parameter: Tensor) -> None:
        self.counts[name] += 1

    def check(self) -> None:
        """Refuse parameters without a gradient, after the passes of a step.

        Raises:
            ConfigError: names them.
        """
        unused = [name for name, count in self.counts.items() if count < self.micro_batches]
        if unused:
            allowed_by = "ddp.find_unused_parameters=true"
            if self.config.ddp.reduction == "canonical":
                allowed_by = f"ddp.reduction=fast and {allowed_by}"
            raise ConfigError(
                f"{', '.join(unused[:3])} of the model {model_label(self.config.model)} have no "
                f"gradient; remove them, or set {allowed_by}"
            )
        self.counts = dict.fromkeys(self.counts, 0)


class _DryRun:
    """The train step of the run with fresh objects, built as every start of the run builds them."""

    def __init__(self, trial: DryRun, few: list[Any], val_metrics: list[str]) -> None:
        """
        Args:
            few: Parts of the micro-batches of a step, on the device.
            val_metrics: as in `check_resumes_exactly`.
        """
        task = trial.task
        loader = _SameBatchLoader(trial.loader, few)
        self.task = task
        self.val_metrics = val_metrics
        self.runtime = trial.runtime.alone()
        self.trainable = build_trainable(self.runtime, task)
        self.effects: list[Effect] = []
        self._step = 0
        self._is_exact = trial.is_exact
        self._old_gradients: list[Tensor] = []
        if self.trainable.actions.actions:
            self.trainable.actions.watch = self._note_effect
        plan = BatchPlan(len(few), 1, world_size=1)
        length = RunLength(task.config, loader.steps_per_epoch)
        self.train_step = TrainStep(self.runtime, task, loader, plan, self.trainable, length)
        # Several ranks would wait for a missing gradient.
        self.gradients: _GradientCheck | None = None
        if trial.runtime.group.world_size > 1 and not task.config.ddp.find_unused_parameters:
            self.gradients = _GradientCheck(self.trainable.model, task.config, len(few))

    def step(self, step: int) -> Tensor:
        """Take an optimizer step and return its loss."""
        self._step = step
        for gradient in self._old_gradients:
            gradient.zero_()  # as DDP, which reuses this memory: a hook must not rely on it
        self._old_gradients.clear()
        losses = self.train_step.passes(step)
        if self.gradients is not None:
            self.gradients.check()  # before the optimizer meets them
        if self.trainable.actions.actions:
            parameters = self.trainable.model.parameters()
            self._old_gradients = [each.grad for each in parameters if each.grad is not None]
        self.train_step.clip()
        self.train_step.update(step)
        return losses["loss"]

    def evaluate(self, step: int, again: bool = False) -> None:
        """Call the hooks of evaluations. They may be slow: repeat them only if one has state."""
        actions = self.trainable.actions
        if not again or any(each.has_state for each in actions.at("evaluation")):
            actions.evaluate(step, self.trainable.model, self.task, self.val_metrics)

    def _note_effect(
        self, event: str, action: Action | None, values: tuple[Any, ...], metrics: dict[str, Mean]
    ) -> None:
        changed = {} if event == "evaluation" else values[1]
        effect = effect_of(action, self._step, changed, metrics, self._is_exact)
        self.effects.append(effect)

    def hook_states(self) -> dict[str, str]:
        """Return the SHA-256 of the state of each hook by its label."""
        actions = self.trainable.actions.actions
        return {action.label: sha256_of_tensors(action.state()) for action in actions}

    def copy(self) -> Snapshot:
        """Return a snapshot of this step, in memory, if it could also be read from a file."""
        kinds = {}
        for kind, tensors in self.trainable.tensors().items():
            encode_header(header_of(tensors))
            kinds[kind] = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        state = {
            "train_state": asdict(TrainState()),
            "scaler": self.runtime.scaler.state_dict(),
        }
        return Snapshot(step=0, state=state, **kinds)

    def load(self, snapshot: Snapshot) -> None:
        """Load a snapshot as a resume does."""
        restore(snapshot, self.trainable, self.runtime.scaler)

    def digest(self) -> list[str]:
        """Return the SHA-256 of every bit of the state, by kind."""
        return [sha256_of_tensors(tensors) for tensors in self.trainable.tensors().values()]
