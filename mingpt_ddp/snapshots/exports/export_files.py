"""Export a snapshot: its weights, their description, and a model card, as files by name."""

import contextlib
import json
from pathlib import PurePosixPath
from typing import Any

from mingpt_ddp.config.keys.model_config import changed_parts
from mingpt_ddp.config.keys.schema import MODELS
from mingpt_ddp.snapshots.exports.transformers_export import transformers_files
from mingpt_ddp.snapshots.format import MODEL, Snapshot
from mingpt_ddp.snapshots.read.load import Step, load, recorded_train_state
from mingpt_ddp.snapshots.read.load_model import read_model_spec
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.storage.remote.remote_errors import redact
from mingpt_ddp.storage.storage import Content

MAX_NAME = 200  # characters of the data's name that a model card shows


def export_files(
    url: str, step: Step, format: str, license: str | None = None
) -> tuple[int, dict[str, Content]]:
    """Return the step and the files of an export.

    Args:
        format: One of WRITERS.
        license: An identifier for the model card.

    Raises:
        SnapshotError: There is no such snapshot, or the format cannot hold its model.
    """
    snapshot = load(url, ("model",), step)
    files = WRITERS[format](snapshot)
    files["README.md"] = _model_card(snapshot, license)
    return snapshot.step, files


def _safetensors(snapshot: Snapshot) -> dict[str, Content]:
    description = json.dumps(describe(snapshot), indent=1) + "\n"
    return {MODEL: encode(snapshot.model), "config.json": description.encode()}


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """Return the configuration of the model and the description of its inputs and outputs.

    A language model has a tokenizer and a context length. For other tasks, the snapshot describes
    the data.

    Raises:
        SnapshotError: The description is missing in the snapshot's state.
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
        spec.config()  # others are copied unchecked, because an export runs no user code
    values["model"] = spec.model
    values["block_size"] = spec.block_size
    values.update(spec.tokenizer.state())
    return values


def _model_card(snapshot: Snapshot, license: str | None) -> bytes:
    """Write the model card in Markdown: the step, the validation loss and the name of the data.

    The name is untrusted. It stands in an indented block, as ASCII in one line, where neither
    Markdown nor YAML interprets it.

    Args:
        license: An identifier that YAML reads as text, or None to name no license.
    """
    licensed = f"license: {license}\n" if license else ""
    facts = f"Step {snapshot.step}"
    val_loss: Any = recorded_train_state(snapshot.state).get("val_loss")
    if type(val_loss) in (int, float) and abs(val_loss) < 1e15:
        facts += f", validation loss {val_loss:.6g} nats"
    data: dict[str, Any] = {}
    with contextlib.suppress(LookupError, TypeError, ValueError):
        data = {**snapshot.state["config"]["data"]}
    path = redact(str(data.get("path") or "several texts"))
    name = redact(str(data.get("name") or PurePosixPath(path).stem))
    return f"""---
{licensed}tags: [mingpt_ddp]
---
# A model trained with mingpt_ddp

{facts}; trained on

    {json.dumps(name[:MAX_NAME])}
""".encode()


WRITERS = {"safetensors": _safetensors, "hf": transformers_files}
