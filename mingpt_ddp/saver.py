"""Capture the run into a snapshot and restore it: rank 0 reads and writes, the others receive."""

from __future__ import annotations

import logging
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from mingpt_ddp import snapshot as format
from mingpt_ddp.config import Config, from_mapping
from mingpt_ddp.corpus import Encoded
from mingpt_ddp.errors import ConfigError, RunError, SnapshotError
from mingpt_ddp.runtime import Runtime
from mingpt_ddp.schema import build
from mingpt_ddp.snapshot import Snapshot, SnapshotStore

log = logging.getLogger(__name__)


@dataclass
class Position:
    """How far the run is, and what it has found. The data position and all random numbers follow from the step."""

    step: int = 0  # optimizer steps done
    train_loss: float | None = None  # nats per character, mean of the last log interval
    val_loss: float | None = None
    val_step: int | None = None  # when it was measured
    best_val_loss: float | None = None
    best_step: int | None = None
    world_size: int = 1  # of the last attempt that trained
    wall_seconds: float = 0.0  # of all attempts, without the work that a kill undid
    loss_sum: float = 0.0  # of the log interval that is under way
    loss_steps: int = 0


def identity(config: dict[str, Any], corpus_sha256: str) -> dict[str, Any]:
    """What a resumed run must have in common with its snapshot, by configuration key."""
    keys = [f"model.{key}" for key in config["model"] if key not in ("name", "dropout")]
    keys += [f"data.{key}" for key in ("block_size", "stride", "train_split", "truncate")]
    keys += ["trainer.batch_size", "optimizer.name", "run.seed"]
    values = {key: config[key.split(".")[0]].get(key.split(".")[1]) for key in keys}
    return values | {"data.path (the text's SHA-256)": corpus_sha256[:16]}


def check_state(step: int, state: Any, config: Config, corpus: Encoded) -> None:
    """
    Raises:
        SnapshotError: the snapshot belongs to another model, text or order of the data, or is not one of ours.
    """
    try:
        from_mapping(state["config"])
        position = build(Position, state["position"], "position")
        sound = position.step == step and state["config"]["trainer"]["batch_size"] % state["micro_batch_size"] == 0
        old = identity(state["config"], state["corpus"]["sha256"])
    except (KeyError, TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise SnapshotError(f"the snapshot of step {step} does not hold what it should: {error}") from error
    if not sound:
        raise SnapshotError(f"the snapshot of step {step} does not hold what it should")
    new = identity(config.to_dict(), corpus.sha256)
    differing = [f"{key} ({old.get(key)} there, {new.get(key)} now)" for key in new if old.get(key) != new.get(key)]
    if differing:
        raise SnapshotError(
            f"the snapshot of step {step} was made with other settings: {', '.join(differing)}; restore them, "
            "or choose another run.name, or run.resume=never"
        )


class Saver:
    """The snapshots of this run, as seen from one rank."""

    def __init__(self, config: Config, runtime: Runtime, url: str, corpus: Encoded) -> None:
        self.config = config
        self.runtime = runtime
        self.corpus = corpus
        self.store = SnapshotStore(url)

    def find(self) -> Snapshot | None:
        """The snapshot to resume from, on every rank; the run's own, else that of run.resume. A collective.

        Raises:
            SnapshotError: there are snapshots, but none that this run can continue.
        """
        found: Snapshot | None = None

        def look() -> dict[str, Any] | None:
            nonlocal found
            found = self.store.newest()
            if found is None and self.config.run.resume not in ("auto", "never"):
                found = format.load(self.config.run.resume)
            if found is None:
                return None
            check_state(found.step, found.state, self.config, self.corpus)
            return {"step": found.step, "state": found.state}

        meta = self.runtime.first(look)
        if meta is None:
            return None
        model = self.runtime.broadcast(found.model if found else None)
        optimizer = self.runtime.broadcast(found.optimizer if found else None)
        return Snapshot(meta["step"], model, optimizer, meta["state"])

    def restore(self, found: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Put a snapshot's content into the live objects."""
        format.load_model(model, found.model)
        format.load_optimizer(model, optimizer, found.optimizer)
        if found.state["scaler"] and self.runtime.scaler.is_enabled():
            self.runtime.scaler.load_state_dict(found.state["scaler"])
        return Position(**found.state["position"])

    def save(
        self, position: Position, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch_size: int
    ) -> None:
        """Commit the state after `position.step` steps, then delete what is no longer kept."""
        if not self.runtime.is_main:
            return
        state = {
            "position": asdict(position),
            "scaler": self.runtime.scaler.state_dict(),
            "micro_batch_size": micro_batch_size,
            "vocabulary": self.corpus.vocabulary,
            "corpus": {"sha256": self.corpus.sha256, "length": self.corpus.length},
            "config": self.config.to_dict(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        snapshot = Snapshot(
            step=position.step,
            model=format.model_tensors(model),
            optimizer=format.optimizer_tensors(model, optimizer),
            state=state,
        )
        best = position.best_step if self.config.snapshot.keep_best else None
        try:
            self.store.write(snapshot)
            log.info("snapshot of step %d committed to %s", position.step, self.store.url, extra={"file_only": True})
            self.store.prune(self.config.snapshot.keep_last, best, newest=position.step)
        except OSError as error:
            if not self.store.storage.local:
                raise
            raise RunError(
                f"cannot write the snapshot of step {position.step} to {self.store.url}: {error.strerror or error}; "
                "the older ones are whole: mend this and run again, or lower snapshot.keep_last"
            ) from error
