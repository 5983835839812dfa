"""Trial steps before anything is written: user code must resume exactly."""

from dataclasses import asdict, replace
from functools import partial
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
from mingpt_ddp.tasks.outputs import check_outputs, outputs_of
from mingpt_ddp.tasks.task import Task, check_metrics
from mingpt_ddp.training.hooks.actions import Actions
from mingpt_ddp.training.length import RunLength
from mingpt_ddp.training.saves.resume import restore
from mingpt_ddp.training.start.hooks_dry_run import check_actions
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import build_trainable

MIN_AVERAGED_BYTES = 4  # per number: 16 bits do not resolve the small steps of an average
DRY_RUN_MICRO_BATCHES = 2  # at most: the second shows that gradients accumulate


def check_user_code(runtime: Runtime, task: Task, loader: Loader, plan: BatchPlan) -> None:
    """Try the user's code: rank zero the steps alone, then all ranks the hooks that act.

    A collective.

    Raises:
        CodeError, ConfigError: as `check_resumes_exactly` and `check_actions`.
    """
    gradients: dict[str, Tensor] | None = None  # on rank zero

    def try_steps() -> dict[str, list[str]]:
        nonlocal gradients
        batch = loader.get_batch(1, plan, 0)
        names, gradients = check_resumes_exactly(runtime, task, loader, batch)
        return names

    names = runtime.group.run_on_rank_zero(try_steps)
    if BUILDERS["action"]:
        check_actions(runtime, task, gradients, names)


def check_resumes_exactly(
    runtime: Runtime, task: Task, loader: Loader, batch: list[MicroBatch]
) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
    """Train some steps, restore the state before the last, and compare the last bit for bit.

    It runs twice: in the objects that took the first steps, and in fresh ones with their restored
    state. Three steps come before it: what an optimizer does at every second one differs then, if
    the optimizer counts by itself. One rank calls this alone. The hooks that act are not called.

    Args:
        loader: of the run.
        batch: the micro-batches of one rank in a step, on the CPU.

    Returns:
        The names of the task's metrics: in "train"ing, and of "val"idation; and, for hooks that
        act, the gradients of the last step, on the CPU.

    Raises:
        CodeError: the code raises, returns the wrong type or shape, or does not resume exactly.
        ConfigError: a parameter gets no gradient, which DDP would wait for.
    """
    few = [task.trial_batch(runtime.to_device(m.batch)) for m in batch[:DRY_RUN_MICRO_BATCHES]]
    same_batch = _SameBatchLoader(loader, few)
    with attribute_errors_to_user_code():
        optimizer = task.config.optimizer
        length = RunLength(task.config, loader.steps_per_epoch)
        check_schedule(optimizer, length.known_steps or optimizer.schedule_steps or 1)
        names = _check_model(runtime, task, runtime.to_device(batch[0].batch), few[0])
        # Build new objects: the checks may have changed buffers.
        first = _DryRun(runtime, task, same_batch)
        fresh = first.digest()
        first.step(1)
        trainable = first.trainable
        state_dict.check_savable(
            trainable.model, trainable.optimizer, by_rows=runtime.strategy.shards_model
        )
        first.step(2)
        first.step(3)
        saved = first.copy()
        loss = first.step(4)
        end = first.digest()
        del first, trainable
        second = _DryRun(runtime, task, same_batch)
        if fresh != second.digest():
            raise _not_exact(f"model {model_label(task.config.model)}", "first weights depend")
        second.load(saved)
        again = second.passes(4)
        gradients = second.copy_gradients() if BUILDERS["action"] else {}
        second.update(4)
        # Otherwise the order of a GPU's sums varies.
        if runtime.device.type == "cpu" or task.config.trainer.deterministic:
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise _not_exact(f"model {model_label(task.config.model)}", "loss depends")
            if end != second.digest():
                raise _not_exact(f"optimizer {task.config.optimizer.name}", "step depends")
        task.check_model(second.trainable.model, few[0], trained=True)
    return names, gradients


def _check_model(runtime: Runtime, task: Task, batch: Any, part: Any) -> dict[str, list[str]]:
    """Check what a user's model returns, what it can be saved as, and whether it compiles.

    Return the names of the task's metrics: in "train"ing, and of "val"idation.

    Args:
        batch: of one micro-batch, on the device.
        part: of it, for trial steps.
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
    return {"train": [*outputs.metrics], "val": [*measured]}


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
    """The train step of the run with fresh objects, built as every start of the run builds them.

    The hooks that act have a dry run of their own, on all ranks.
    """

    def __init__(self, runtime: Runtime, task: Task, loader: _SameBatchLoader) -> None:
        self.runtime = runtime.alone()
        self.trainable = replace(
            build_trainable(self.runtime, task), actions=Actions(task.config, self.runtime, ())
        )
        micro_batches = len(loader.batch)
        plan = BatchPlan(micro_batches, 1, world_size=1)
        length = RunLength(task.config, loader.steps_per_epoch)
        self.train_step = TrainStep(self.runtime, task, loader, plan, self.trainable, length)
        self.gradients: _GradientCheck | None = None  # which several ranks would wait for
        if runtime.group.world_size > 1 and not task.config.ddp.find_unused_parameters:
            model = self.trainable.model
            self.gradients = _GradientCheck(model, task.config, micro_batches)

    def step(self, step: int) -> Tensor:
        """Take an optimizer step and return its loss."""
        loss = self.passes(step)
        self.update(step)
        return loss

    def passes(self, step: int) -> Tensor:
        losses = self.train_step.passes(step)
        if self.gradients is not None:
            self.gradients.check()  # before the optimizer meets them
        return losses["loss"]

    def copy_gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name, on the CPU."""
        named = self.trainable.model.named_parameters()
        return {name: p.grad.to("cpu", copy=True) for name, p in named if p.grad is not None}

    def update(self, step: int) -> None:
        self.train_step.clip()
        self.train_step.update(step)

    def copy(self) -> Snapshot:
        """Return a snapshot of this step, in memory, if it could also be read from a file."""
        kinds = {}
        for kind, tensors in self.trainable.tensors().items():
            encode_header(header_of(tensors))
            kinds[kind] = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        return Snapshot(
            step=0,
            model=kinds["model"],
            optimizer=kinds["optimizer"],
            state={
                "train_state": asdict(TrainState()),
                "scaler": self.runtime.scaler.state_dict(),
            },
            ema=kinds.get("ema", {}),
        )

    def load(self, snapshot: Snapshot) -> None:
        """Load a snapshot as a resume does."""
        restore(snapshot, self.trainable, self.runtime.scaler)

    def digest(self) -> list[str]:
        """Return the SHA-256 of every bit of the state, by kind."""
        return [sha256_of_tensors(tensors) for tensors in self.trainable.tensors().values()]
