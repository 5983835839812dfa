"""The model card of an export, README.md: how to load it, its figures, data, commands and
configuration.

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
from mingpt_ddp.snapshots.format import MAX_CONFIG_CHARS, Snapshot, step_of
from mingpt_ddp.snapshots.load import recorded_train_state
from mingpt_ddp.storage.remote_errors import redact
from mingpt_ddp.storage.run_dir import load_yaml
from mingpt_ddp.storage.storage import read_regular
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
    export = (
        f"python -m mingpt_ddp.snapshots export {shlex.quote(redact(url))} step={snapshot.step}"
    )
    export += f" to={shlex.quote(directory)} format={form}" + (
        f" license={license}" if license else ""
    )
    terms = f"license: {license}\n" if license else ""
    commands = [*training_commands(url), export]
    sha256 = ""
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        sha256 = recorded_sha256(state)
    parts = [
        f"---\n{FRONT_MATTER.get(form, '')}{terms}tags: [mingpt_ddp]\n---",
        "# A model trained with mingpt_ddp",
        "## Load it",
        _block(_loading(form, values, state.get("vocabulary"), directory)),
        "## Figures",
        "Losses are mean cross-entropy in nats.",
        "\n".join(
            [
                "| | |",
                "|---|---|",
                *(f"| {name} | {value:.6g} |" for name, value in figures(snapshot).items()),
            ]
        ),
        "## Data",
        "SHA-256 of the content of `data.path`:",
        _block([sha256]),
        "## Commands",
        _block(commands),
        "## Configuration",
        # A card is published, and a command may have a token for a server.
        _block(
            f"{key}={redact(json.dumps(value))}"
            for key, value in values.items()
            if key not in COMMAND_KEYS
        ),
    ]
    return ("\n\n".join(parts) + "\n").encode()


def _flat(config: Any) -> dict[str, Any]:
    """Return the values of an untrusted configuration by key."""
    with contextlib.suppress(AttributeError, TypeError):
        return flatten(config)
    return {}


def _loading(form: str, values: dict[str, Any], vocabulary: Any, directory: str) -> list[str]:
    modern = values.get("model.architecture") == "modern"
    block_size = values.get("data.block_size")
    new = 200 if modern or not isinstance(block_size, int) else max(1, min(200, block_size - 1))
    prompt = "\n" if not isinstance(vocabulary, str) or "\n" in vocabulary else vocabulary[:1]
    filled = {"path": json.dumps(directory), "prompt": json.dumps(prompt), "new": new}
    return [
        line.format(trust=", trust_remote_code=True" if modern else "", **filled)
        for line in LOADING[form]
    ]


def figures(snapshot: Snapshot) -> dict[str, float]:
    """Return the numbers of the snapshot's train state that tell how good the model is."""
    recorded = recorded_train_state(snapshot.state)
    metrics = recorded.get("val_metrics")
    names = ("train_loss", "val_loss", "val_step", "best_val_loss", "best_step")
    found: dict[str, Any] = {name: recorded.get(name) for name in names}
    for name, value in (metrics if isinstance(metrics, dict) else {}).items():
        found[name if name.startswith("bits_per_") else f"val_{name}"] = value
    numbers = {
        name: value
        for name, value in found.items()
        if type(value) in (int, float) and abs(value) < 1e15
    }
    if "val_loss" in numbers and isinstance(snapshot.state.get("vocabulary"), str):
        numbers.setdefault("bits_per_char", numbers["val_loss"] / math.log(2))
    parameters = sum(tensor.numel() for tensor in snapshot.model.values())
    known = {
        name: value for name, value in numbers.items() if re.fullmatch(r"\w{1,60}", name, re.ASCII)
    }
    return {"step": snapshot.step, "parameters": parameters, **known}


def training_commands(url: str) -> list[str]:
    """Return the command that the run's directory records, if the URL is in one on this machine.

    Else [].
    """
    storage = open_storage(url)
    run = Path(storage.root)
    run = run.parent if step_of(run.name) is not None else run
    run = run.parent if run.name == "snapshots" else run
    with contextlib.suppress(OSError, ValueError):
        words = (
            load_yaml(read_regular(run / ".hydra" / "overrides.yaml", MAX_CONFIG_CHARS))
            if storage.local
            else None
        )
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            last = {key_of(word): word for word in words}  # a worker's have run.name twice
            shown = (
                shlex.quote(redact(word)) for key, word in last.items() if key not in COMMAND_KEYS
            )
            return [" ".join(["python", "main.py", *shown])]
    return []


def _block(lines: Iterable[str]) -> str:
    """Return an indented block; control characters and line breaks are escaped."""
    return "\n".join(
        "    " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines
    )
