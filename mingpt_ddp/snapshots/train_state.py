"""How far a run is, as its snapshots keep it, and whether a snapshot's state is one that the run can continue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mingpt_ddp.config.config import CODE_LOCATION_KEYS, Config, NotRegisteredError, from_mapping
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.errors import ConfigError, SnapshotError


@dataclass
class TrainState:
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
    stall_seconds: float = 0.0  # of those, waiting for snapshots
    wasted_seconds: float = 0.0  # starting, and work that a kill undid, of all attempts
    saved_at: float = 0.0  # seconds since 1970, when this was put down
    loss_ema: float | None = None  # what the guard against spikes compares with
    consecutive_skips: int = 0  # the latest steps that were left out
    skipped_steps: list[int] = field(default_factory=list)  # steps that are not to be trained, after going back

    @property
    def goodput(self) -> float:
        """The share of the processes' time that became lasting progress, 0 to 1."""
        return (self.wall_seconds - self.stall_seconds) / max(self.wall_seconds + self.wasted_seconds, 1e-9)


def identity(config: dict[str, Any], corpus_sha256: str) -> dict[str, Any]:
    """What a resumed run must have in common with its snapshot, by configuration key."""
    keys = [f"model.{key}" for key in config["model"] if key not in ("name", "dropout", *CODE_LOCATION_KEYS)]
    keys += [f"data.{key}" for key in ("block_size", "stride", "train_split", "truncate")]
    keys += ["trainer.batch_size", "optimizer.name", "run.seed"]
    values = {key: config[key.split(".")[0]].get(key.split(".")[1]) for key in keys}
    return values | {"data.path (the text's SHA-256)": corpus_sha256[:16]}


def check_state(step: int, state: Any, config: Config, corpus: EncodedText) -> None:
    """
    Raises:
        SnapshotError: the snapshot belongs to another model, text or order of the data, or is not one of ours.
    """
    try:
        stored = _typed(state["config"])
        position = build(TrainState, state["position"], "position")
        sound = position.step == step and stored["trainer"]["batch_size"] % state["micro_batch_size"] == 0
        old = identity(stored, state["corpus"]["sha256"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, ConfigError) as error:
        raise SnapshotError(f"the snapshot of step {step} does not hold what it should: {str(error)[:300]}") from error
    if not sound:
        raise SnapshotError(f"the snapshot of step {step} does not hold what it should")
    new = identity(config.to_dict(), corpus.sha256)
    keys = [key for key in new if old.get(key) != new.get(key)]
    differing = [f"{key} ({str(old.get(key))[:100]} there, {new.get(key)} now)" for key in keys]
    if differing:
        raise SnapshotError(
            f"the snapshot of step {step} was made with other settings: {', '.join(differing)}; restore them, "
            "or choose another run.name, or run.resume=never"
        )


def _typed(values: Any) -> Any:
    """A recorded configuration, checked and with the defaults of keys that are newer; as it is if its code is unknown.

    Raises:
        ConfigError: it is none.
    """
    try:
        return from_mapping(values).to_dict()
    except NotRegisteredError:  # another model or optimizer than now, which is told as such
        return values
