"""`python -m mingpt_ddp.snapshots export`: the weights of one snapshot as a file that other programs read."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from mingpt_ddp.cli.arguments import echo
from mingpt_ddp.config.schema import MODELS
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError, SnapshotError
from mingpt_ddp.snapshots.buffer import encode
from mingpt_ddp.snapshots.format import MODEL, Snapshot, directory_name
from mingpt_ddp.snapshots.load import find_steps, load
from mingpt_ddp.snapshots.load_model import read_model_spec
from mingpt_ddp.storage.storage import atomic_write, sync_directory


@dataclass(frozen=True)
class ExportConfig:
    url: str
    to: str  # a local directory that does not exist yet
    step: int | None = None  # null: the newest

    def __post_init__(self) -> None:
        check(bool(self.to.strip()) and "://" not in self.to, f"to={self.to} must be a new local directory")


def export(config: ExportConfig) -> int:
    """Write the weights and their description to a directory that appears complete or not at all."""
    target = Path(config.to)
    check(not os.path.lexists(target), f"to={config.to} is there already; name a new directory")
    snapshot = load(config.url if config.step is None else _step_url(config.url, config.step), kinds=("model",))
    files: dict[str, bytes | memoryview] = {MODEL: encode(snapshot.model), "config.json": describe(snapshot)}
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, content in files.items():
            atomic_write(partial / name, content)
        os.rename(partial, target)
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"cannot write to {config.to}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    echo(f"step {snapshot.step} is in {target}: {', '.join(files)}")
    return 0


def _step_url(url: str, step: int) -> str:
    for store, steps in find_steps(url):
        if step in steps:
            return f"{store.url}/{directory_name(step)}"
    raise SnapshotError(f"there is no snapshot of step {step} at {url}")


def describe(snapshot: Snapshot) -> bytes:
    """Return as JSON what a program needs to use the weights: the model's shape and the character of each token.

    Raises:
        SnapshotError: the snapshot's state does not hold it.
    """
    spec = read_model_spec(snapshot.state)
    if spec.model["architecture"] in MODELS:  # what a user's file registers is copied unchecked: export runs no code
        spec.config()
    train_state = snapshot.state.get("position")
    values = {
        "step": snapshot.step,
        "val_loss": train_state.get("val_loss") if isinstance(train_state, dict) else None,  # nats per character
        "model": spec.model,
        "block_size": spec.block_size,
        "vocabulary": spec.vocabulary,
    }
    return (json.dumps(values, indent=1) + "\n").encode()
