"""A trial run: the train step of the run in fresh objects, on one small batch."""

from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.model_config import model_label
from mingpt_ddp.data.dataloader import BatchPlan, Loader, MicroBatch
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.snapshots.staging_buffer import encode_header, lay_out
from mingpt_ddp.tasks.outputs import Mean
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.dry_run.hook_effects import (
    STATE_IN_PASSES,
    Effect,
    effect_of,
    refuse_other_states,
)
from mingpt_ddp.training.hooks.actions import Action
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.saves.resume import restore
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

DRY_RUN_MICRO_BATCHES = 2  # at most: the second shows that gradients accumulate


@dataclass(frozen=True)
class DryRun:
    """The run, its task and its data, which all trial runs share."""

    runtime: Runtime
    task: Task
    loader: Loader
    plan: BatchPlan

    @cached_property
    def batch(self) -> list[MicroBatch]:
        """The micro-batches of rank zero in the first step, on the CPU."""
        return self.loader.get_batch(1, self.plan, 0)

    @cached_property
    def few(self) -> list[Any]:
        """Small parts of these micro-batches, on the device. They suffice for trial steps."""
        few = self.batch[:DRY_RUN_MICRO_BATCHES]
        return [self.task.trial_batch(self.runtime.to_device(micro.batch)) for micro in few]

    @property
    def is_exact(self) -> bool:
        """Return True if a repeated step has the same bits. On a GPU the order of sums varies."""
        is_cpu = self.runtime.device.type == "cpu"
        return is_cpu or bool(self.task.config.trainer.deterministic)


class _SameBatchLoader:
    """The same few micro-batches in every step."""

    def __init__(self, loader: Loader, batches: list[Any]) -> None:
        """
        Args:
            batches: One batch for each micro-batch, on the device.
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


class TrialRun:
    """The train step of the run with fresh objects, built as every start of the run builds them."""

    def __init__(self, dry_run: DryRun, val_metrics: list[str]) -> None:
        """
        Args:
            val_metrics: As in `check_resumes_exactly`.
        """
        task = dry_run.task
        few = dry_run.few
        loader = _SameBatchLoader(dry_run.loader, few)
        self.task = task
        self.val_metrics = val_metrics
        self.runtime = dry_run.runtime.alone()
        self.trainable = build_trainable(self.runtime, task)
        self.effects: list[Effect] = []
        self._step = 0
        self._is_exact = dry_run.is_exact
        self._old_gradients: list[Tensor] = []
        if self.trainable.actions.actions:
            self.trainable.actions.watch = self._note_effect
        plan = BatchPlan(len(few), 1, world_size=1)
        length = RunLength(task.config, loader.steps_per_epoch)
        self.train_step = TrainStep(self.runtime, task, loader, plan, self.trainable, length)
        # Several ranks would wait for a missing gradient.
        self.gradients: _GradientCheck | None = None
        if dry_run.runtime.group.world_size > 1 and not task.config.ddp.find_unused_parameters:
            self.gradients = _GradientCheck(self.trainable.model, task.config, len(few))

    def step(self, step: int) -> Tensor:
        """Take an optimizer step and return its loss."""
        self._step = step
        for gradient in self._old_gradients:
            gradient.zero_()  # as DDP, which reuses this memory: a hook must not rely on it
        self._old_gradients.clear()
        states = self.hook_states()
        losses = self.train_step.passes(step)
        refuse_other_states(states, self.hook_states(), STATE_IN_PASSES)
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
            encode_header(lay_out(tensors))
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
