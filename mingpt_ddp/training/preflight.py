"""Checks before anything is written: the batch, the memory, and that user code resumes exactly."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import attribute_errors_to_user_code, is_user_defined
from mingpt_ddp.data.dataloader import BatchPlan, Loader, MicroBatch
from mingpt_ddp.distributed.compile import check_compiles
from mingpt_ddp.distributed.device import total_memory
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError, SnapshotError
from mingpt_ddp.models import apply_activation_checkpointing, count_parameters, flops_per_token
from mingpt_ddp.optim.lr_schedule import check_schedule
from mingpt_ddp.snapshots import state_dict
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.load import check_none_newer, load, readable_stores
from mingpt_ddp.snapshots.staging_buffer import encode_header, header_of
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.lock import check_can_lock
from mingpt_ddp.storage.run_dir import run_directory, run_name
from mingpt_ddp.tasks.outputs import check_outputs, outputs_of
from mingpt_ddp.tasks.task import Task, check_metrics
from mingpt_ddp.training.actions import Actions
from mingpt_ddp.training.train_state import TrainState, restore
from mingpt_ddp.training.train_step import TrainStep, count_steps
from mingpt_ddp.training.trainable import build_trainable

MIN_AVERAGED_BYTES = 4  # per number: 16 bits do not resolve the small steps of an average
BYTES = 8  # per parameter with its gradient, in fp32; optimizer state not included
TRIAL_MICRO_BATCHES = 2  # at most: the second shows that gradients accumulate


@dataclass(frozen=True)
class Recorded:
    """What the snapshot that a run resumes from has recorded, without its tensors."""

    step: int
    batch_size: int  # trainer.batch_size
    micro_batch_size: int
    source: str | None  # the URL that run.resume names, if the run has no snapshot of its own
    state: Any  # the content of its state.json, untrusted


def check_directories(directory: Path, stores: list[SnapshotStore]) -> None:
    """Refuse directories of a run and of its snapshots that could not be locked.

    Raises:
        RunError: names the directory.
    """
    check_can_lock(directory)
    for storage in (store.storage for store in stores if store.storage.local):
        check_can_lock(Path(storage.root), what="the snapshot directory", key="path for snapshots")


def read_recorded(
    config: Config, stores: list[SnapshotStore], group: ProcessGroup
) -> Recorded | None:
    """Read what the snapshot that the run resumes from has recorded; None without one.

    A collective.

    Args:
        stores: of the run's snapshots.

    Raises:
        SnapshotError: another version wrote it, in another format, or its batch is not one.
        StorageUnavailableError: a store does not respond.
    """

    def read() -> dict[str, Any] | None:
        newest, source = newest_snapshot(config, stores)
        return None if newest is None else asdict(_recorded(newest, source))

    found = group.run_on_rank_zero(read)
    return None if found is None else Recorded(**found)


def _recorded(newest: Snapshot, source: str | None) -> Recorded:
    try:
        batch = newest.state["config"]["trainer"]["batch_size"]
        micro = newest.state["micro_batch_size"]
        if not all(type(size) is int and size > 0 for size in (batch, micro)):
            raise ValueError(f"batches of {batch} and {micro}")
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the snapshot of step {newest.step} has an invalid state: {error}"[:300]
        ) from error
    return Recorded(newest.step, batch, micro, source, newest.state)


def newest_snapshot(
    config: Config, stores: list[SnapshotStore]
) -> tuple[Snapshot | None, str | None]:
    """Read the state of the snapshot that the run resumes from, without tensors.

    Raises as `read_recorded` does.

    Returns:
        The snapshot, if there is one, and the URL that run.resume names if it is not the run's own.
    """
    directory = run_directory(config)
    stores = readable_stores(stores, directory, config.run.source)
    own = [store.newest_state() for store in stores]
    newest = max(filter(None, own), key=lambda snapshot: snapshot.step, default=None)
    check_none_newer(stores, directory, newest.step if newest else 0)
    source = config.run.source if newest is None else None
    return (newest, None) if source is None else (load(source, kinds=()), source)


def with_batch_size(config: Config, world_size: int, recorded: int | None) -> Config:
    """Return the configuration with `batch_size` for `batch_size_per_rank`; the run keeps its name.

    Args:
        recorded: the batch size of the snapshot to resume, which stays as it was at the first
            start.
    """
    per_rank = config.trainer.batch_size_per_rank
    if per_rank is None:
        return config
    trainer = replace(
        config.trainer, batch_size=recorded or per_rank * world_size, batch_size_per_rank=None
    )
    return replace(config, run=replace(config.run, name=run_name(config)), trainer=trainer)


def check_fits(config: Config, runtime: Runtime, task: Task) -> None:
    """Check that a built-in model fits the smallest memory of all ranks. A collective.

    Raises:
        ConfigError: the parameters and gradients alone do not fit, or the model has not what a key
            needs.
    """
    # its constructor may allocate any amount
    if is_user_defined("model", config.model.architecture):
        return
    memory = min(runtime.group.all_gather(total_memory(runtime.device)))
    with torch.device("meta"):  # allocates nothing
        model = task.build_model()
    if config.trainer.activation_checkpointing:
        apply_activation_checkpointing(model)
    runtime.strategy.check_model(model)
    count = count_parameters(model)
    memory = runtime.strategy.model_memory(memory)
    if count * BYTES > memory:
        raise ConfigError(
            f"the model {config.model.name} has {count:,} parameters, which need "
            f"{count * BYTES / 2**30:,.0f} GiB with "
            f"their gradients, but there are {memory / 2**30:,.0f} GiB of memory; choose a "
            "smaller model"
        )


def check_resumes_exactly(
    runtime: Runtime, task: Task, loader: Loader, batch: list[MicroBatch]
) -> None:
    """Train three steps, restore the state after the second, and compare the third bit for bit.

    The third step runs twice: in the objects that took the first two, and in fresh ones with their
    restored state. One rank calls this alone.

    Args:
        loader: of the run.
        batch: the micro-batches of one rank in a step, on the CPU.

    Raises:
        CodeError: the code raises, returns the wrong type or shape, or does not resume exactly.
        ConfigError: a parameter gets no gradient, which DDP would wait for.
    """
    few = [task.trial_batch(runtime.to_device(m.batch)) for m in batch[:TRIAL_MICRO_BATCHES]]
    trial_loader = _TrialLoader(loader, few)
    with attribute_errors_to_user_code():
        check_schedule(task.config.optimizer, count_steps(task.config, loader.steps_per_epoch))
        _check_model(runtime, task, runtime.to_device(batch[0].batch), few[0])
        # new ones: the checks may have changed buffers
        first = _Trial(runtime, task, trial_loader)
        fresh = first.digest()
        first.step(1)
        trainable = first.trainable
        state_dict.check_savable(
            trainable.model, trainable.optimizer, by_rows=runtime.strategy.shards_model
        )
        first.step(2)
        saved = first.copy()
        loss = first.step(3)
        end = first.digest()
        del first, trainable
        second = _Trial(runtime, task, trial_loader)
        if fresh != second.digest():
            raise _not_exact(f"model {task.config.model.architecture}", "first weights depend")
        second.load(saved)
        again = second.step(3)
        # otherwise GPU summation order varies
        if runtime.device.type == "cpu" or task.config.trainer.deterministic:
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise _not_exact(f"model {task.config.model.architecture}", "loss depends")
            if end != second.digest():
                raise _not_exact(f"optimizer {task.config.optimizer.name}", "step depends")
        task.check_model(second.trainable.model, few[0], trained=True)


def _check_model(runtime: Runtime, task: Task, batch: Any, part: Any) -> None:
    """Check what a user's model returns, what it can be saved as, and whether it compiles.

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
        check_outputs(f"the model {config.model.architecture}", outputs)
        check_metrics(config.task.name, outputs.losses | outputs.metrics)
        measured = task.metrics(model, part)
    Actions(runtime.alone()).evaluate(0, model, task, taken=measured)
    if runtime.compiles:
        check_compiles(model, config, lambda model: task.loss(model, part))


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


class _TrialLoader:
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
                f"{', '.join(unused[:3])} of the model {self.config.model.architecture} have no "
                f"gradient; remove them, or set {allowed_by}"
            )
        self.counts = dict.fromkeys(self.counts, 0)


class _Trial:
    """The train step of the run with fresh objects, built as every start of the run builds them."""

    def __init__(self, runtime: Runtime, task: Task, loader: _TrialLoader) -> None:
        self.runtime = runtime.alone()
        self.trainable = build_trainable(self.runtime, task)
        micro_batches = len(loader.batch)
        plan = BatchPlan(micro_batches, 1, world_size=1)
        self.train_step = TrainStep(self.runtime, task, loader, plan, self.trainable)
        self.gradients: _GradientCheck | None = None  # which several ranks would wait for
        if runtime.group.world_size > 1 and not task.config.ddp.find_unused_parameters:
            model = self.trainable.model
            self.gradients = _GradientCheck(model, task.config, micro_batches)

    def step(self, step: int) -> Tensor:
        """Take an optimizer step and return its loss."""
        losses = self.train_step.passes(step)
        if self.gradients is not None:
            self.gradients.check()  # before the optimizer meets them
        self.train_step.clip()
        self.train_step.update(step)
        return losses["loss"]

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
        return [
            state_dict.sha256_of_tensors(tensors) for tensors in self.trainable.tensors().values()
        ]
