"""Choose the objective: the number that ranks jobs. By default it is the validation loss."""

import contextlib
import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.storage.storage import read_regular
from mingpt_ddp.storage.yaml_and_json import finite

# Keys of the group `data` that determine the content of a text.
TEXT_KEYS = (
    "path",
    "reader",
    "sources",
    "sha256",
    "truncate",
    "train_split",
    "test_split",
    "split_paths",
    "column",
    "format",
    "dtype",
)
TOKENIZER = "tokenizer.json"  # file name of a BPE tokenizer in the run directory
MAX_TOKENIZER_BYTES = 1 << 26
WHY_BITS_PER_BYTE = "losses per token of different tokenizers cannot be compared"


@dataclass(frozen=True)
class Objective:
    """The number by which jobs are ranked."""

    key: str  # key of the number in result.json and metrics.jsonl
    title: str  # title in sentences and on pages
    column: str  # title of the column in a table
    maximize: bool = False  # True if higher values are better

    @property
    def metric(self) -> str:
        """The value of `sweep.metric` that names this objective."""
        return f"{'-' * self.maximize}{self.key}"

    @property
    def better(self) -> str:
        """The word for better values: higher or lower."""
        return "higher" if self.maximize else "lower"

    @property
    def note(self) -> str:
        """A note that says which values are better, or "" for a standard objective."""
        return "" if self in STANDARD.values() else f"{self.better} is better"

    def cost(self, value: float) -> float:
        """Turn a value into a cost (lower is better), or a cost back into its value."""
        return -value if self.maximize else value

    def recorded_in(self, result: Mapping[str, Any]) -> Any:
        """Return the unchecked value in an untrusted result.json. Return None if it is missing."""
        return result.get(self.key, result.get(self.key.removeprefix("val_")))

    def value(self, result: Mapping[str, Any]) -> float:
        """Return the value in a result.json. If it has none, return the worst value (infinite)."""
        value = finite(self.recorded_in(result))
        return self.cost(math.inf) if value is None else value


LOSS = Objective("val_loss", "validation loss", "val loss")
BITS_PER_BYTE = Objective("val_bits_per_byte", "bits per byte", "bits_per_byte")
STANDARD = {"val_loss": LOSS, "bits_per_byte": BITS_PER_BYTE, "val_bits_per_byte": BITS_PER_BYTE}


def objective_named(metric: str | None) -> Objective:
    """Return the objective that `sweep.metric` names: NAME, or -NAME to maximize it."""
    if metric is None:
        return LOSS
    name = metric.removeprefix("-")
    return STANDARD.get(metric) or Objective(name, name, name, maximize=name != metric)


def default_objective(units: Iterable[Hashable]) -> Objective:
    """Choose the objective of jobs if the user does not name one.

    Args:
        units: The result of `loss_unit` for each job.
    """
    return BITS_PER_BYTE if len({*units} - {None}) > 1 else LOSS


def loss_unit(config: Mapping[str, Any], directory: Path | None = None) -> Hashable:
    """Return a hashable key for the unit of a job's loss. Return None if the data has no tokens.

    Losses can be compared if their units are equal. The unit depends on the tokenizer, and on
    whether the end of each document is predicted.

    Args:
        config: An untrusted configuration by dotted key.
        directory: The run directory. None if the run has not begun.
    """
    if not is_text(config):
        return None
    tokenizer = _tokenizer(config, directory)
    return ("documents", tokenizer) if config.get("data.end_token") else tokenizer


def _tokenizer(config: Mapping[str, Any], directory: Path | None) -> Hashable:
    """Return a hashable key. Jobs with the same tokenizer have equal keys."""
    kind = config["data.tokenizer"]
    source = config.get("run.init_from")
    # Before its first start, a run has recorded neither run.init_sha256 nor a tokenizer. It will
    # use the tokenizer of these weights.
    if source is not None and config.get("run.init_sha256") is None:
        return "tokenizer of the weights", repr(source)
    if kind == "char" and config.get("data.format") == "tokens":
        # The file has token ids, and their tokenizer is not known.
        return "token id", repr(config.get("data.vocab_size"))
    if kind in ("char", "byte"):
        return str(kind)
    if directory is not None:
        with contextlib.suppress(OSError):
            content = read_regular(directory / TOKENIZER, MAX_TOKENIZER_BYTES)
            return hashlib.sha256(content).hexdigest()
    trained_on = []
    if kind == "bpe":
        trained_on = [config.get(f"data.{key}") for key in ("vocab_size", *TEXT_KEYS)]
    return repr([kind, source, *trained_on])


def is_text(config: Mapping[str, Any]) -> bool:
    """Return True if a job's data is a text, so that it has a tokenizer."""
    return "data.path" in config and "data.dataset" not in config
