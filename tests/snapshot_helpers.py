"""Make small snapshots, and commit them as the ranks of a run do."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.data.tokenizers.bpe import BPETokenizer, train_bpe
from mingpt_ddp.data.tokenizers.tokenizer_base import EXACT, Tokenizer
from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.models import build_model
from mingpt_ddp.snapshots.format import (
    MANIFEST,
    STATE,
    Snapshot,
    decode_manifest,
    encode_manifest,
    shard_name,
)
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.snapshots.state_dict import model_state
from mingpt_ddp.snapshots.write.shard_plan import share_tensors
from mingpt_ddp.snapshots.write.store import SnapshotStore

VOCABULARY = "\n abc"
SHA256 = "5e" * 32  # stands for the hash of the text


def digests(run: Path) -> dict[str, str]:
    """Return the tensor hashes of a run's newest snapshot, and the losses and norms it has logged.

    The hashes are SHA-256, one for each kind of tensor.
    """
    found = tensor_digests(str(run))
    rows = read_history(run / METRICS).rows
    logged = [
        {key: value for key, value in row.items() if key == "grad_norm" or "loss" in key}
        for row in rows
    ]
    return found | {"logged": str(logged)}


def tensor_digests(url: str) -> dict[str, str]:
    """Return the step of a run's newest snapshot, and its SHA-256 for each kind of tensor."""
    snapshot = load(url)
    found = {"step": str(snapshot.step)}
    for kind in ("model", "optimizer", "ema"):
        digest = hashlib.sha256()
        for name, tensor in sorted(getattr(snapshot, kind).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        found[kind] = digest.hexdigest()
    return found


def commit(store: SnapshotStore, snapshot: Snapshot, writers: int = 1) -> None:
    """Write and commit a snapshot.

    Args:
        store: Where the snapshot is written.
        snapshot: The snapshot.
        writers: Number of ranks over which the tensors are sharded, if there are enough tensors.
    """
    store.clear(snapshot.step)
    files = {}
    tensors = {"model": snapshot.model, "optimizer": snapshot.optimizer} | (
        {"ema": snapshot.ema} if snapshot.ema else {}
    )
    shares = share_tensors(tensors, range(writers))
    for kind, named in tensors.items():
        ranks = shares.ranks[kind]
        for rank in ranks:
            own = {n: t for n, t in named.items() if shares.writer(kind, n) == rank}
            name = shard_name(kind, ranks.index(rank), len(ranks))
            files |= store.write_files(snapshot.step, {name: encode(own)})
    files |= store.write_files(
        snapshot.step, {STATE: json.dumps(snapshot.state, indent=1).encode()}
    )
    store.commit(snapshot.step, [files])


def mend_manifest(snapshot: Path, name: str) -> None:
    """Make the manifest of a committed snapshot match a file that the test has changed."""
    content = (snapshot / name).read_bytes()
    step = int(snapshot.name.removeprefix("step_"))
    files = decode_manifest((snapshot / MANIFEST).read_bytes(), step)
    files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (snapshot / MANIFEST).write_bytes(encode_manifest(step, files))


def flip_bit(snapshot: Path, name: str = "model.safetensors", bit: int = 0) -> None:
    """Flip a bit of a tensor, and update the manifest."""
    path = snapshot / name
    tensors = safetensors.torch.load_file(path)
    words = max(tensors.values(), key=torch.numel).view(torch.int32).flatten()
    words[len(words) // 2] ^= 1 << bit
    safetensors.torch.save_file(tensors, path)
    mend_manifest(snapshot, name)


def edit_state(snapshot: Path, **changes: dict[str, Any]) -> None:
    """Change entries of state.json, and update the manifest."""
    state = json.loads((snapshot / STATE).read_text())
    for key, values in changes.items():
        state[key] |= values
    (snapshot / STATE).write_text(json.dumps(state))
    mend_manifest(snapshot, STATE)


def small_snapshot(step: int) -> Snapshot:
    """Make a snapshot whose tensors depend on the step."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(5, 3, generator=generator)
    return Snapshot(
        step=step,
        model={
            "weight": weights,
            "bias": torch.zeros(3, dtype=torch.bfloat16),
            "count": torch.tensor(step),
        },
        optimizer={"weight:exp_avg": weights / 2, "weight:step": torch.tensor(float(step))},
        state={"train_state": {"step": step, "loss": 1.5, "best": None}, "vocabulary": "\n aä€😀"},
    )


@functools.cache
def _small_config() -> Config:
    small = [
        "model=gpt_nano",
        "model.n_layer=2",
        "model.n_embd=12",
        "data.block_size=8",
        "trainer.device=cpu",
    ]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", small)))


def model_snapshot(step: int, **state: Any) -> Snapshot:
    """Make a snapshot of a small model from a run on 3 ranks.

    `state` replaces parts of its state.json.
    """
    config = _small_config()
    torch.manual_seed(step)
    model = model_state(build_model(config.model, len(VOCABULARY), config.data.block_size))
    train_state = {
        "step": step,
        "train_loss": 2.5,
        "val_loss": 2.25,
        "best_step": 4,
        "val_metrics": {"accuracy": 0.5},
    }
    train_state |= {"world_size": 3, "saved_at": 1e9}
    text = {"sha256": SHA256, "length": 100}
    written = {
        "config": config.to_dict(),
        "vocabulary": VOCABULARY,
        "text": text,
        "train_state": train_state,
    }
    return Snapshot(
        step, model, {"norm.weight:step": torch.tensor(float(step))}, {**written, **state}
    )


def bpe_with_special(*names: str) -> BPETokenizer:
    """Return a BPE tokenizer with special tokens after its other tokens."""
    values = json.loads(train_bpe(iter(["to be or not to be " * 9]), 270).json)
    size = len(values["model"]["vocab"])
    values["added_tokens"] = [
        {"id": size + i, "content": name, "special": True, **EXACT} for i, name in enumerate(names)
    ]
    return BPETokenizer(json.dumps(values))


def random_snapshot(tokenizer: Tokenizer, *overrides: str, **state: Any) -> Snapshot:
    """Make a snapshot of large random weights with a context of 16 tokens.

    `state` replaces parts of its state.json.
    """
    words = ["data.block_size=16", *overrides]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        config = from_mapping(to_plain(compose("config", words)))
    torch.manual_seed(0)
    model = build_model(config.model, tokenizer.vocab_size, config.data.block_size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    written = {"config": config.to_dict(), **tokenizer.state()}
    return Snapshot(4, model_state(model), {}, {**written, **state})


def filled(run: str, *snapshots: Snapshot | int) -> SnapshotStore:
    """Commit snapshots to the run directory at a URL. A step stands for its `model_snapshot`."""
    store = SnapshotStore(f"{run}/snapshots")
    for each in snapshots:
        commit(store, model_snapshot(each) if isinstance(each, int) else each)
    return store
