"""Before anything is written: the batch of a resumed run.

The model fits; user code trains and resumes exactly.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import attribute_errors_to_user_code, is_user_defined
from mingpt_ddp.data.rng import seed_everything
from mingpt_ddp.distributed.compile import check_compiles
from mingpt_ddp.distributed.device import total_memory
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError, SnapshotError
from mingpt_ddp.models import apply_activation_checkpointing, count_parameters, flops_per_token
from mingpt_ddp.models.placement import blocks_of
from mingpt_ddp.snapshots import state_dict
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.load import load, stores_of_run
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.lock import check_can_lock
from mingpt_ddp.storage.run_dir import run_directory
from mingpt_ddp.tasks.task import Task, named_losses
from mingpt_ddp.training.train_step import build_model_and_optimizer

# Of the newest snapshot, or None: trainer.batch_size and the micro-batch size; its step, or 0; and
# the URL that run.resume names, if the run has no snapshot of its own; and the state.
RecordedBatch: TypeAlias = tuple[int | None, int | None, int, str | None, Any]
MIN_AVERAGED_BYTES = 4  # per number: 16 bits do not resolve the small steps of an average
BYTES = 8  # per parameter with its gradient, in fp32; optimizer state not included


def check_directories(directory: Path, stores: list[SnapshotStore]) -> None:
    """Refuse directories of a run and of its snapshots that could not be locked.

    Raises:
        RunError: names the directory.
    """
    check_can_lock(directory)
    for storage in (store.storage for store in stores if store.storage.local):
        check_can_lock(Path(storage.root), what="the snapshot directory", key="path for snapshots")


def recorded_batch(config: Config, stores: list[SnapshotStore]) -> RecordedBatch:
    """Read the batch of the snapshot that the run resumes from.

    Args:
        stores: of the run's snapshots.

    Raises:
        SnapshotError: another version wrote it, in another format, or its batch is not one.
        StorageUnavailableError: a store does not respond.
    """
    newest, source = newest_snapshot(config, stores)
    if newest is None:
        return None, None, 0, None, None
    try:
        batch = newest.state["config"]["trainer"]["batch_size"]
        micro = newest.state["micro_batch_size"]
        if not all(type(size) is int and size > 0 for size in (batch, micro)):
            raise ValueError(f"batches of {batch} and {micro}")
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the snapshot of step {newest.step} has an invalid state: {error}"[:300]
        ) from error
    return batch, micro, newest.step, source, newest.state


def newest_snapshot(
    config: Config, stores: list[SnapshotStore]
) -> tuple[Snapshot | None, str | None]:
    """Read the state of the snapshot that the run resumes from, without tensors; raises as
    `recorded_batch` does.

    Returns:
        The snapshot, if there is one, and the URL that run.resume names if it is not the run's own.
    """
    own = [store.newest_state() for store in stores_of_run(stores, run_directory(config))]
    newest = max(filter(None, own), key=lambda snapshot: snapshot.step, default=None)
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
    return replace(config, run=replace(config.run, name=config.run_name()), trainer=trainer)


def check_fits(config: Config, runtime: Runtime, task: Task) -> None:
    """Check that a built-in model fits the smallest memory of all ranks. A collective.

    Raises:
        ConfigError: the parameters and gradients alone do not fit, or the model has not the blocks
            that a key needs.
    """
    # its constructor may allocate any amount
    if is_user_defined("model", config.model.architecture):
        return
    memory = min(runtime.group.all_gather(total_memory(runtime.devices)))
    with torch.device("meta"):  # allocates nothing
        model = task.build_model()
    if config.trainer.activation_checkpointing:
        apply_activation_checkpointing(model)
    if config.model.devices > 1:
        blocks_of(model, config.model.devices)
    count = count_parameters(model)
    if runtime.strategy.shards_model:
        memory *= runtime.strategy.shards
    if count * BYTES > memory:
        raise ConfigError(
            f"the model {config.model.name} has {count:,} parameters, which need "
            f"{count * BYTES / 2**30:,.0f} GiB with "
            f"their gradients, but there are {memory / 2**30:,.0f} GiB of memory; choose a "
            "smaller model"
        )


def check_resumes_exactly(runtime: Runtime, task: Task, batch: Any) -> None:
    """Train three steps, restore the state after the second into fresh objects, and compare the
    third bit for bit.

    Args:
        batch: of one micro-batch, on the CPU.

    Raises:
        CodeError: the code raises, returns the wrong type or shape, or does not resume exactly.
        ConfigError: a parameter gets no gradient, which DDP would wait for.
    """
    config = task.config
    batch = runtime.to_device(batch)
    part = task.trial_batch(batch)
    with attribute_errors_to_user_code():
        first = _Trial(runtime, task)
        flops_per_token(first.model)
        state_dict.check_savable(first.model, first.optimizer)
        coarse = [
            name
            for name, p in first.model.named_parameters()
            if p.dtype.itemsize < MIN_AVERAGED_BYTES
        ]
        if coarse and config.trainer.ema is not None:
            raise ConfigError(
                f"trainer.ema={config.trainer.ema} needs {coarse[0]} in fp32; average it in "
                "your model"
            )
        scalars = [
            name for name, parameter in first.model.named_parameters() if parameter.dim() == 0
        ]
        if scalars and runtime.strategy.shards_model:
            key = f"ddp.strategy={config.ddp.strategy}"
            raise ConfigError(
                f"{key} cannot split {scalars[0]}, a scalar; give it one element, or use zero1"
            )
        with runtime.autocast():
            task.check_model(first.model, batch, trained=False)
        if runtime.compiles:
            check_compiles(first.model, config, lambda model: task.loss(model, part))
        first = _Trial(runtime, task)  # the checks may have changed buffers
        fresh = first.digest()
        first.step(1, part)
        state_dict.check_savable(first.model, first.optimizer, runtime.strategy.shards_model)
        first.step(2, part)
        saved = [
            {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
            for tensors in first.state()
        ]
        loss = first.step(3, part)
        end = first.digest()
        del first
        second = _Trial(runtime, task)
        if fresh != second.digest():
            raise _not_exact(f"model {config.model.architecture}", "first weights depend")
        state_dict.load_model_state(second.model, saved[0])
        state_dict.load_optimizer_state(second.model, second.optimizer, saved[1])
        again = second.step(3, part)
        # otherwise GPU summation order varies
        if runtime.device.type == "cpu" or config.trainer.deterministic:
            if not torch.equal(loss.nan_to_num(), again.nan_to_num()):
                raise _not_exact(f"model {config.model.architecture}", "loss depends")
            if end != second.digest():
                raise _not_exact(f"optimizer {config.optimizer.name}", "step depends")
        task.check_model(second.model, part, trained=True)


def _not_exact(part: str, depends: str) -> CodeError:
    return CodeError(
        f"the {part} would not resume exactly: its {depends} on more than the snapshot and "
        "torch's seed; keep its "
        "state in parameters, buffers or optimizer.state, and draw random numbers from "
        "torch's global generator"
    )


class _Trial:
    """A fresh model and optimizer, built as every start of the run builds them."""

    def __init__(self, runtime: Runtime, task: Task) -> None:
        self.config = task.config
        self.runtime = runtime
        self.task = task
        self.model, self.optimizer = build_model_and_optimizer(runtime, task)

    def step(self, step: int, batch: Any) -> Tensor:
        """Take an optimizer step with the seeds of the run, and return its loss."""
        seed_everything("dropout", self.config.run.seed, step, 0)
        with self.runtime.autocast():
            loss = named_losses(self.task.loss(self.model, batch))["loss"]
        loss.backward()
        unused = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if (
            unused
            and self.runtime.group.world_size > 1
            and not self.config.ddp.find_unused_parameters
        ):
            raise ConfigError(
                f"{', '.join(unused[:3])} of the model {self.config.model.architecture} have "
                "no gradient; remove them, "
                "or set ddp.find_unused_parameters=true"
            )
        seed_everything("update", self.config.run.seed, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of a snapshot: those of the model and of the optimizer, by name."""
        return state_dict.model_state(self.model), state_dict.optimizer_state(
            self.model, self.optimizer
        )

    def digest(self) -> bytes:
        """Return the SHA-256 of every bit of the state."""
        digest = hashlib.sha256()
        for tensors in self.state():
            for name, tensor in sorted(tensors.items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(
                    tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                )
        return digest.digest()
