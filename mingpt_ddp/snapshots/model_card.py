"""The model card of an export, README.md: how to load it, its figures, data and commands.

Text from a snapshot is untrusted. It stands in indented blocks, a line a value, where Markdown and
YAML read nothing.
"""

import contextlib
import json
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import COMMAND_KEYS, flatten
from mingpt_ddp.config.hydra_utils import key_of
from mingpt_ddp.errors import command
from mingpt_ddp.snapshots.format import Snapshot, step_of
from mingpt_ddp.snapshots.load import recorded_train_state
from mingpt_ddp.storage.records import read_yaml
from mingpt_ddp.storage.remote_errors import redact
from mingpt_ddp.storage.urls import open_storage
from mingpt_ddp.tasks.task import recorded_sha256

LOADING = {
    "safetensors": (
        "from safetensors.torch import load_file",
        "tensors = load_file({path} + '/model.safetensors')",
        "print({{name: tensor.shape for name, tensor in tensors.items()}})",
    ),
    "torch": (
        "import torch",
        "saved = torch.load({path} + '/model.pt', weights_only=True)",
        "print(saved['model'], saved['state_dict'].keys())",
    ),
    "hf": (
        "from transformers import pipeline",
        "write = pipeline('text-generation', {path}{trust})",
        "print(write({prompt}, max_new_tokens={new}, do_sample=True)[0]['generated_text'])",
    ),
}
NEW_TOKENS = 200
FRONT_MATTER = {"hf": "library_name: transformers\npipeline_tag: text-generation\n"}


def model_card(
    snapshot: Snapshot, url: str, form: str, directory: str, license: str | None = None
) -> bytes:
    """Return the card as Markdown.

    Args:
        url: what is exported.
        form: the format of the export.
        directory: where the export will be.
        license: an identifier that YAML reads as text; None: the card says nothing.
    """
    state = snapshot.state if isinstance(snapshot.state, dict) else {}
    values = _flat(state.get("config"))
    source = shlex.quote(redact(url))
    export = f"{command('snapshots')} export {source} step={snapshot.step}"
    export += f" to={shlex.quote(directory)} format={form}"
    front_matter = FRONT_MATTER.get(form, "")
    if license:
        export += f" license={license}"
        front_matter += f"license: {license}\n"
    sha256 = ""
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        sha256 = recorded_sha256(state)
    table = ["| | |", "|---|---|"]
    for name, value in figures(snapshot).items():
        table.append(f"| {name} | {value:.6g} |")
    # A card is published, and a command may have a token for a server.
    configuration = []
    for key, value in values.items():
        if key not in COMMAND_KEYS:
            configuration.append(f"{key}={redact(json.dumps(value))}")
    parts = [
        f"---\n{front_matter}tags: [mingpt_ddp]\n---",
        "# A model trained with mingpt_ddp",
        "## Load it",
        _block(_loading(form, values, state.get("vocabulary"), directory)),
        "## Figures",
        "Losses are mean cross-entropy in nats.",
        "\n".join(table),
        "## Data",
        "SHA-256 of its content:",
        _block([sha256]),
        "## Commands",
        _block([*training_commands(url), export]),
        "## Configuration",
        _block(configuration),
    ]
    return ("\n\n".join(parts) + "\n").encode()


def _flat(config: Any) -> dict[str, Any]:
    """Return the values of an untrusted configuration by key."""
    with contextlib.suppress(AttributeError, TypeError):
        return flatten(config)
    return {}


def _loading(form: str, values: dict[str, Any], vocabulary: Any, directory: str) -> list[str]:
    """Return lines of Python that load the export."""
    is_modern = values.get("model.architecture") == "modern"
    block_size = values.get("data.block_size")
    new = NEW_TOKENS
    if isinstance(block_size, int) and not is_modern:  # the prompt has one token
        new = max(1, min(NEW_TOKENS, block_size - 1))
    prompt = "\n"
    if isinstance(vocabulary, str) and "\n" not in vocabulary:
        prompt = vocabulary[:1]
    filled = {
        "path": json.dumps(directory),
        "prompt": json.dumps(prompt),
        "new": new,
        "trust": ", trust_remote_code=True" if is_modern else "",
    }
    return [line.format(**filled) for line in LOADING[form]]


def figures(snapshot: Snapshot) -> dict[str, float]:
    """Return the numbers of the snapshot's train state that tell how good the model is."""
    recorded = recorded_train_state(snapshot.state)
    names = ("train_loss", "val_loss", "val_step", "best_val_loss", "best_step")
    found: dict[str, Any] = {name: recorded.get(name) for name in names}
    metrics = recorded.get("val_metrics")
    if isinstance(metrics, dict):
        for name, value in metrics.items():
            found[name if name.startswith("bits_per_") else f"val_{name}"] = value
    numbers: dict[str, float] = {"step": snapshot.step}
    numbers["parameters"] = sum(tensor.numel() for tensor in snapshot.model.values())
    for name, value in found.items():
        is_figure = type(value) in (int, float) and abs(value) < 1e15
        if is_figure and re.fullmatch(r"\w{1,60}", name, re.ASCII):
            numbers[name] = value
    if "val_loss" in numbers and isinstance(snapshot.state.get("vocabulary"), str):
        numbers.setdefault("bits_per_char", numbers["val_loss"] / math.log(2))
    return numbers


def training_commands(url: str) -> list[str]:
    """Return the command that the run's directory records; [] if that is not on this machine."""
    storage = open_storage(url)
    if not storage.local:
        return []
    run = Path(storage.root)
    if step_of(run.name) is not None:
        run = run.parent
    if run.name == "snapshots":
        run = run.parent
    try:
        overrides = read_yaml(run / ".hydra" / "overrides.yaml")
    except (OSError, ValueError):
        return []
    if not isinstance(overrides, list) or not all(isinstance(each, str) for each in overrides):
        return []
    last = {key_of(override): override for override in overrides}  # a worker's have run.name twice
    words = [command()]
    for key, override in last.items():
        if key not in COMMAND_KEYS:
            words.append(shlex.quote(redact(override)))
    return [" ".join(words)]


def _block(lines: Iterable[str]) -> str:
    """Return an indented block; control characters and line breaks are escaped."""
    return "\n".join("    " + "".join(map(_escape, line)) for line in lines)


def _escape(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
