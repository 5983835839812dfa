"""Read the records of the snapshot that a run resumes from, and set the batch size by them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.job import run_name
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.format import KINDS, Snapshot
from mingpt_ddp.snapshots.read.load import load, refuse_other_location
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training.saves.resume import INVALID, read_train_state
from mingpt_ddp.training.train_state import TrainState


@dataclass(frozen=True)
class Recorded:
    """What the snapshot that a run resumes from has recorded, without its tensors."""

    step: int
    state: dict[str, Any]  # the content of its state.json, untrusted but for the following

    @property
    def batch_size(self) -> int:
        return int(self.state["config"]["trainer"]["batch_size"])

    @property
    def micro_batch_size(self) -> int:
        return int(self.state["micro_batch_size"])

    @property
    def train_state(self) -> TrainState:
        return read_train_state(self.state)


def read_recorded(
    store: SnapshotStore, directory: Path, source: str | None, group: ProcessGroup
) -> Recorded | None:
    """Read the records of the snapshot that the run resumes from. Return None if there is none.

    A collective.

    Args:
        store: Store of the run's snapshots.
        directory: Directory of the run.
        source: As `RunConfig.source`.

    Raises:
        SnapshotError: It has the format of another version, or records an invalid batch.
        StorageUnavailableError: the store does not respond.
    """

    def read() -> dict[str, Any] | None:
        newest = newest_snapshot(store, directory, source, KINDS)
        if newest is None:
            return None
        _check(newest)
        return {"step": newest.step, "state": newest.state}

    recorded = group.run_on_rank_zero(read)
    return None if recorded is None else Recorded(**recorded)


def _check(newest: Snapshot) -> None:
    try:
        batch = newest.state["config"]["trainer"]["batch_size"]
        micro = newest.state["micro_batch_size"]
        if not all(type(size) is int and size > 0 for size in (batch, micro)):
            raise ValueError(f"batches of {batch} and {micro}")
        read_train_state(newest.state)
    except INVALID as error:
        raise SnapshotError(
            f"the snapshot of step {newest.step} has an invalid state: {error}"[:300]
        ) from error


def newest_snapshot(
    store: SnapshotStore, directory: Path, source: str | None, kinds: Sequence[str] = ()
) -> Snapshot | None:
    """Read the state of the snapshot that the run resumes from, if there is one.

    Arguments and errors are those of `read_recorded`.

    Args:
        kinds: of the tensors to read, which may be damaged, if it is that of run.resume.
    """
    if newest := store.newest_state():
        return newest
    if source:
        return load(source, kinds)
    refuse_other_location(store, directory)
    return None


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
