"""Export a snapshot: its weights, what describes them, and a model card, as files by name."""

import io
import json
from typing import Any

import torch

from mingpt_ddp.config.keys.model_config import changed_parts
from mingpt_ddp.config.keys.schema import MODELS
from mingpt_ddp.snapshots.exports.model_card import model_card
from mingpt_ddp.snapshots.exports.transformers_export import transformers_files
from mingpt_ddp.snapshots.format import MODEL, Snapshot
from mingpt_ddp.snapshots.read.load import Step, load, recorded_train_state
from mingpt_ddp.snapshots.read.load_model import read_model_spec
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.storage.storage import Content


def export_files(
    url: str, step: Step, format: str, license: str | None = None
) -> tuple[int, dict[str, Content]]:
    """Return the step and the files of an export.

    Args:
        format: one of WRITERS.
        license: an identifier for the model card.

    Raises:
        SnapshotError: there is no such snapshot, or the format cannot hold its model.
    """
    snapshot = load(url, ("model",), step)
    files = WRITERS[format](snapshot)
    has_tokenizer = format != "hf" or "tokenizer.json" in files
    files["README.md"] = model_card(snapshot, format, license, has_tokenizer)
    return snapshot.step, files


def _safetensors(snapshot: Snapshot) -> dict[str, Content]:
    description = json.dumps(describe(snapshot), indent=1) + "\n"
    return {MODEL: encode(snapshot.model), "config.json": description.encode()}


def _torch(snapshot: Snapshot) -> dict[str, Content]:
    """Save tensors and plain values only, which torch.load reads with weights_only=True."""
    buffer = io.BytesIO()
    torch.save({**describe(snapshot), "state_dict": snapshot.model}, buffer)
    return {"model.pt": buffer.getbuffer()}


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """Return the description of the weights: the model's configuration, and how to use it.

    For text that is the tokenizer and the context length, else what the snapshot says of its data.

    Raises:
        SnapshotError: the snapshot's state lacks it.
    """
    state = snapshot.state
    values: dict[str, Any] = {"step": snapshot.step}
    values["val_loss"] = recorded_train_state(state).get("val_loss")
    if isinstance(state, dict) and "data" in state:  # another task than a language model
        config = state.get("config")
        for group in ("task", "model"):
            values[group] = config.get(group) if isinstance(config, dict) else None
        values["data"] = state["data"]
        return values
    spec = read_model_spec(state)
    if spec.model["architecture"] in MODELS and not changed_parts(spec.model):
        spec.config()  # others are copied unchecked: export runs no user code
    values["model"] = spec.model
    values["block_size"] = spec.block_size
    values.update(spec.tokenizer.state())
    return values


WRITERS = {"safetensors": _safetensors, "torch": _torch, "hf": transformers_files}
