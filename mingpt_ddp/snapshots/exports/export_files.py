"""Create the files of an export: the weights of a model, its configuration, and a model card."""

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

MAX_NAME_CHARS = 200  # longest name of the data in a model card


def export_files(
    url: str, step: Step, format: str, license: str | None = None
) -> tuple[int, dict[str, Content]]:
    """Create an export of a snapshot. Return the step of the snapshot, and the files by name.

    Args:
        url: URL of a run directory, of a directory of snapshots, or of one snapshot.
        step: Step of the snapshot, or "newest" or "best".
        format: "safetensors" for this package's format, or "hf" for transformers.
        license: Identifier of a license for the model card, or None.

    Raises:
        SnapshotError: There is no such snapshot, or the format cannot hold its model.
    """
    snapshot = load(url, ("model",), step)
    files = WRITERS[format](snapshot)
    files["README.md"] = _model_card(snapshot, license)
    return snapshot.step, files


def _safetensors(snapshot: Snapshot) -> dict[str, Content]:
    """Create the files of an export in this package's format, by name."""
    description = json.dumps(describe(snapshot), indent=1) + "\n"
    return {MODEL: encode(snapshot.model), "config.json": description.encode()}


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """Return the values of an export's config.json: the model, and its inputs and outputs.

    For a language model, the tokenizer and the context length describe the inputs and outputs. For
    any other task, the description of the data in the snapshot does.

    Raises:
        SnapshotError: The state of the snapshot does not describe the model.
    """
    state = snapshot.state
    values: dict[str, Any] = {"step": snapshot.step}
    values["val_loss"] = recorded_train_state(state).get("val_loss")
    if isinstance(state, dict) and "data" in state:  # the task is not a language model
        config = state.get("config")
        for group in ("task", "model"):
            values[group] = config.get(group) if isinstance(config, dict) else None
        values["data"] = state["data"]
        return values
    spec = read_model_spec(state)
    # Validate only built-in models without a user's own parts, because an export does not run user
    # code.
    if spec.model["architecture"] in MODELS and not changed_parts(spec.model):
        spec.config()
    values["model"] = spec.model
    values["block_size"] = spec.block_size
    values.update(spec.tokenizer.state())
    return values


def _model_card(snapshot: Snapshot, license: str | None) -> bytes:
    """Write the model card in Markdown: the step, the validation loss and the name of the data.

    The name of the data is untrusted. It is written as one line of ASCII in an indented block,
    where neither Markdown nor YAML interprets it.

    Args:
        license: Identifier of a license. YAML must read it as text, not as a number or a date.
            None to name no license.
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

    {json.dumps(name[:MAX_NAME_CHARS])}
""".encode()


# For each format, the function that creates the files of an export without its model card.
WRITERS = {"safetensors": _safetensors, "hf": transformers_files}
