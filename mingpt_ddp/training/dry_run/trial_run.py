"""A trial run: a few steps on a small batch, with its own model and optimizer (dry run)."""

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
    STATE_CHANGED_IN_PASSES,
    Effect,
    effect_of,
    refuse_different_states,
)
from mingpt_ddp.training.hooks.actions import Action
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.saves.resume import restore
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

# A trial step has at most this many micro-batches. The second one shows that gradients accumulate.
DRY_RUN_MICRO_BATCHES = 2


@dataclass(frozen=True)
class DryRun:
    """The run, its task and its data, which all trial runs share."""

    runtime: Runtime
    task: Task
    loader: Loader
    plan: BatchPlan

    @cached_property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of rank zero in the first step, on the CPU."""
        return self.loader.get_batch(1, self.plan, 0)

    @cached_property
    def trial_batches(self) -> list[Any]:
        """A small part of each of the first micro-batches, on the device, for the trial steps."""
        first = self.micro_batches[:DRY_RUN_MICRO_BATCHES]
        return [self.task.trial_batch(self.runtime.to_device(micro.batch)) for micro in first]

    @property
    def is_exact(self) -> bool:
        """True if a repeated step must have the same bits. On a GPU the order of sums may vary."""
        is_cpu = self.runtime.device.type == "cpu"
        return is_cpu or bool(self.task.config.trainer.deterministic)


class _SameBatchLoader:
    """A loader that returns the same micro-batches in every step."""

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
        """Do nothing, since there is nothing to release."""


class _GradientCheck:
    """Refuses a model if one of its parameters gets no gradient in a micro-batch."""

    def __init__(self, model: nn.Module, config: Config, micro_batches: int) -> None:
        self.config = config
        self.micro_batches = micro_batches
        self.counts: dict[str, int] = {}  # number of gradients in this step, by parameter name
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.counts[name] = 0
                parameter.register_post_accumulate_grad_hook(partial(self._count, name))

    def _count(self, name: str, parameter: Tensor) -> None:
        self.counts[name] += 1

    def check(self) -> None:
        """Refuse parameters without a gradient, after the passes of a step.

        Raises:
            ConfigError: The message names the parameters.
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
    """The run's train step with new objects, which are built as in every start of the run."""

    def __init__(self, dry_run: DryRun, val_metrics: list[str]) -> None:
        """
        Args:
            dry_run: The runtime, task and data that all trial runs share.
            val_metrics: Names of the task's metrics of the validation split.
        """
        task = dry_run.task
        trial_batches = dry_run.trial_batches
        loader = _SameBatchLoader(dry_run.loader, trial_batches)
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
        plan = BatchPlan(len(trial_batches), 1, world_size=1)
        length = RunLength(task.config, loader.steps_per_epoch)
        self.train_step = TrainStep(self.runtime, task, loader, plan, self.trainable, length)
        # In training with several ranks, DDP would wait forever for a missing gradient.
        self.gradient_check: _GradientCheck | None = None
        if dry_run.runtime.group.world_size > 1 and not task.config.ddp.find_unused_parameters:
            self.gradient_check = _GradientCheck(
                self.trainable.model, task.config, len(trial_batches)
            )

    def step(self, step: int) -> Tensor:
        """Take an optimizer step and return its loss."""
        self._step = step
        for gradient in self._old_gradients:
            # In training, DDP reuses the memory of old gradients. Overwrite it here too, to find a
            # hook that relies on an old gradient.
            gradient.zero_()
        self._old_gradients.clear()
        states = self.hook_states()
        losses = self.train_step.passes(step)
        refuse_different_states(states, self.hook_states(), STATE_CHANGED_IN_PASSES)
        if self.gradient_check is not None:
            # Check this before the update, since an optimizer may fail without a gradient.
            self.gradient_check.check()
        if self.trainable.actions.actions:
            parameters = self.trainable.model.parameters()
            self._old_gradients = [each.grad for each in parameters if each.grad is not None]
        self.train_step.clip()
        self.train_step.update(step)
        return losses["loss"]

    def evaluate(self, step: int, is_repeated: bool = False) -> None:
        """Call the hooks of evaluations.

        Args:
            step: Number of the last step.
            is_repeated: True if they have been called before. Hooks of evaluations may be slow, so
                they are then called only if one of them has state.
        """
        actions = self.trainable.actions
        if not is_repeated or any(each.has_state for each in actions.at("evaluation")):
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
        """Return a snapshot of this step in memory. Check that it could be saved to a file."""
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
        """Load a snapshot in the same way as a resumed run."""
        restore(snapshot, self.trainable, self.runtime.scaler)

    def digest(self) -> list[str]:
        """Return the SHA-256 of the model, the optimizer, and all other tensors of the state."""
        return [sha256_of_tensors(tensors) for tensors in self.trainable.tensors().values()]
