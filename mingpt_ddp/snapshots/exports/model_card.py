"""The model card of an export, README.md: how to load it, its validation loss and its data."""

import contextlib
import json
from pathlib import PurePosixPath
from typing import Any

from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.read.load import recorded_train_state
from mingpt_ddp.storage.remote.remote_errors import redact

LOADING = {
    "safetensors": (
        "from safetensors.torch import load_file",
        "tensors = load_file('model.safetensors')",
    ),
    "torch": ("import torch", "saved = torch.load('model.pt', weights_only=True)"),
    "hf": (
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "model = AutoModelForCausalLM.from_pretrained('.'{trust})",
        "tokenizer = AutoTokenizer.from_pretrained('.'{trust})",
    ),
}
IDS_ALONE = (  # for transformers, without a tokenizer
    "from transformers import AutoModelForCausalLM",
    "model = AutoModelForCausalLM.from_pretrained('.'{trust})  # takes token ids, not text",
)
DESCRIPTIONS = {"torch": "`saved`"}  # else config.json
MAX_NAME = 200  # characters of the data's name
FRONT_MATTER = {"hf": "library_name: transformers\npipeline_tag: text-generation\n"}


def model_card(
    snapshot: Snapshot, form: str, license: str | None = None, has_tokenizer: bool = True
) -> bytes:
    """Return the card as Markdown.

    The name of the data is untrusted: it stands in an indented block, as ASCII in one line, where
    Markdown and YAML read nothing.

    Args:
        form: the format of the export.
        license: an identifier that YAML reads as text; None: the card says nothing.
        has_tokenizer: false of a directory for transformers with the model alone.
    """
    front_matter = FRONT_MATTER.get(form, "")
    if license:
        front_matter += f"license: {license}\n"
    step = f"Step {snapshot.step}"
    val_loss: Any = recorded_train_state(snapshot.state).get("val_loss")
    if type(val_loss) in (int, float) and abs(val_loss) < 1e15:
        step += f", validation loss {val_loss:.6g} nats"
    description = DESCRIPTIONS.get(form, "[config.json](config.json)")
    is_ours = _recorded(snapshot.state, "model", "architecture") == "modern"
    trust = ", trust_remote_code=True" if is_ours else ""
    lines = LOADING[form] if has_tokenizer else IDS_ALONE
    loading = "\n".join(f"    {line.format(trust=trust)}" for line in lines)
    name = _recorded(snapshot.state, "data", "name")
    path = redact(str(_recorded(snapshot.state, "data", "path") or "several texts"))
    data = redact(str(name or PurePosixPath(path).stem))
    return f"""---
{front_matter}tags: [mingpt_ddp]
---

# A model trained with mingpt_ddp

{loading}

{step}; {description} describes the model. It was trained on

    {json.dumps(data[:MAX_NAME])}
""".encode()


def _recorded(state: Any, group: str, key: str) -> Any:
    """Return a value of an untrusted state's configuration; None if it has none."""
    with contextlib.suppress(LookupError, TypeError):
        return state["config"][group][key]
    return None
