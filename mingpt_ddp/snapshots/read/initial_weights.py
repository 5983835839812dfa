"""Read the weights that `run.init_from` names.

`run.init_from` may name a run, a snapshot, an export, or a GPT-2 in Hugging Face's format. All of
these are untrusted. They are read only as safetensors and JSON, which cannot run code.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mingpt_ddp.data.tokenizers.tokenizer import NoTokenizer, Tokenizer
from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.format import MAX_STATE_BYTES, MODEL, load_json
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.snapshots.read.load_model import read_model_spec
from mingpt_ddp.snapshots.tensor_index import check_memory, decode
from mingpt_ddp.snapshots.transformers_format.model_files import model_values, our_tensors
from mingpt_ddp.snapshots.transformers_format.tokenizer_files import read_tokenizer
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.storage.urls import open_storage

log = logging.getLogger(__name__)

PICKLES = ("model.pt", "pytorch_model.bin")  # usual file names of pickles, which are never read


@dataclass(frozen=True)
class InitialWeights:
    """A model's weights, and the settings that a run takes over with them."""

    model: dict[str, Any]  # the group `model` of the model's configuration, unchecked
    # Vocabulary size and context length in tokens. None if the task is not a language model.
    sizes: tuple[int | None, int | None]
    tokenizer_state: dict[str, Any]  # as in state.json. {} if there is no tokenizer
    data: dict[str, Any]  # the keys of the group `data` that the weights determine, with values
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def sha256(self) -> str:
        """Return the SHA-256 of the weights' names and values.

        It is the same for a snapshot and for its exports.
        """
        return sha256_of_tensors(self.tensors)


def read_initial_weights(url: str) -> InitialWeights:
    """Read the weights at a URL.

    Raises:
        SnapshotError: There are no weights, they are damaged, or no model of this package can use
            them.
        StorageUnavailableError: The storage does not respond.
    """
    storage = open_storage(url, "run.init_from")
    with _as_snapshot_error(url):
        weights = _read(storage, url)
        layers = weights.model.get("n_layer")
        # Refuse an impossible number of layers now: building the layers would take a long time.
        if type(layers) is int and layers > len(weights.tensors):
            raise ValueError(f"n_layer is {layers}, but there are {len(weights.tensors)} tensors")
        # Raise an error if a token has surrogates, which UTF-8 cannot encode.
        json.dumps(weights.tokenizer_state, ensure_ascii=False).encode()
    if weights.data and not weights.tokenizer_state:
        log.warning(
            "run.init_from=%s has no tokenizer (tokenizer.json, or vocab.json and merges.txt): the "
            "run uses the tokens of data.tokenizer, for which the embeddings were not trained",
            url,
        )
    return weights


def _read(storage: Storage, url: str) -> InitialWeights:
    names = storage.list()
    if not names and storage.has_flock:
        what = "has no files" if os.path.exists(storage.root) else "does not exist"
        raise SnapshotError(
            f"run.init_from={url} {what}; name the directory of a run, a snapshot, an export "
            "or a GPT-2 (config.json and model.safetensors): the name of a model on a hub does not "
            "work, because nothing is downloaded"
        )
    pickles = [name for name in PICKLES if name in names and MODEL not in names]
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, which is never read; save the weights as {MODEL}"
        )
    if MODEL not in names or "config.json" not in names:
        snapshot = load(url, ("model",))
        return weights_of_state(snapshot.state, snapshot.model)
    values = load_json(storage.read("config.json", MAX_STATE_BYTES))
    tensors = _read_tensors(storage)
    if "model_type" not in values:
        return _weights_of_export(values, tensors)
    model, sizes = model_values(values)
    tokenizer = read_tokenizer(storage, names)
    return _weights_of_language_model(model, sizes, tokenizer, our_tensors(tensors))


def weights_of_state(state: Any, tensors: dict[str, Tensor] | None = None) -> InitialWeights:
    """Describe the weights of a snapshot, with its tensors if they are given.

    Args:
        state: The untrusted values in state.json.
    """
    if "data" in state:  # the data are samples, not a text
        return InitialWeights(dict(state["config"]["model"]), (None, None), {}, {}, tensors or {})
    spec = read_model_spec(state)
    return _weights_of_language_model(spec.model, spec.sizes, spec.tokenizer, tensors or {})


def _weights_of_language_model(
    model: dict[str, Any],
    sizes: tuple[int, int],
    tokenizer: Tokenizer | None,
    tensors: dict[str, Tensor],
) -> InitialWeights:
    """Return the weights of a language model, with its tokenizer."""
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"its vocabulary size and context length are {str(sizes)[:100]}, but must be positive "
            "whole numbers"
        )
    _, block_size = sizes
    tokenizer_state: dict[str, Any] = {}
    data: dict[str, Any] = {"block_size": block_size}
    if tokenizer:
        tokenizer_state = tokenizer.state()
        if isinstance(tokenizer, NoTokenizer):
            data["vocab_size"] = tokenizer.vocab_size
        else:
            data["tokenizer"] = tokenizer.name
    return InitialWeights(model, sizes, tokenizer_state, data, tensors)


def _weights_of_export(values: Any, tensors: dict[str, Tensor]) -> InitialWeights:
    """Return the weights in an export with format=safetensors.

    Args:
        values: The untrusted values in the config.json of the export.
    """
    config = {"model": values["model"], "data": {"block_size": values.get("block_size")}}
    return weights_of_state({**values, "config": config}, tensors)


@contextlib.contextmanager
def _as_snapshot_error(url: str) -> Iterator[None]:
    """Turn errors that damaged or unexpected content causes into a SnapshotError of one line."""
    try:
        yield
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        MemoryError,
    ) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SnapshotError(f"run.init_from={url} cannot be used: {reason}") from error


def _read_tensors(storage: Storage) -> dict[str, Tensor]:
    check_memory(MODEL, storage.size(MODEL) or 0)
    return decode({MODEL: storage.read(MODEL)})
