"""The keys of the task and the data, which users can extend with a Python file.

Users can also extend the keys of the model (model_config.py) and of the optimizer
(optimizer_config.py). The table of all groups is in schema.py.
"""

# ruff: noqa: RUF009  key() returns a dataclass field
import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from mingpt_ddp.config.keys.fields import (
    DecayFactor,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    key,
    neutral,
)
from mingpt_ddp.config.validation import check, check_directory, check_url

SPLITS_WITH_OWN_TEXT = ("val", "test")  # the keys of data.split_paths
MIN_BPE_VOCAB_SIZE = 257  # all 256 bytes, and one learnt token
BUILTIN_PREFIX = "builtin:"  # begins the path of a text that ships with Python
TextFormat: TypeAlias = Literal["auto", "text", "jsonl", "parquet", "csv", "tokens"]


@dataclass(frozen=True, kw_only=True)
class UserCodeConfig:
    """The key for your own code, which several groups have (mingpt_ddp/config/builders.py)."""

    code: str | None = neutral(
        None, "Your Python file to load, relative to the YAML file that names it."
    )

    def __post_init__(self) -> None:
        """Check conditions that involve several keys. Subclasses override this."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(UserCodeConfig):
    """The task, which computes loss and metrics of a batch (mingpt_ddp/tasks)."""

    name: str = key(
        "language_model",
        "Task to train: language_model, or the name that your code registers.",
    )


@dataclass(frozen=True, kw_only=True)
class ClassesConfig(TaskConfig):
    """The task to learn. Its targets are classes: the next token, or a label."""

    label_smoothing: DecayFactor = key(
        0.0, "Share of each target that is spread over all classes. Applies to training only."
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(UserCodeConfig):
    """The text to train on, its splits, and its windows (mingpt_ddp/data/dataset.py)."""

    name: str | None = neutral(
        None, "Label of the text in directory names and logs. null uses the file name of data.path."
    )
    path: str | None = key(
        None,
        "Text to train on: a file, a directory, any fsspec URL, or builtin:python_docs. Your "
        "own reader may interpret it differently.",
    )
    format: TextFormat = neutral(
        "auto",
        "Format of the text. auto detects it from the name or the content at the first start."
        " text reads any UTF-8 file as it is.",
        changes="training",
    )
    column: str | None = key(
        None,
        "Column of a jsonl, parquet or csv file that holds the texts. null uses the only "
        "column of strings.",
    )
    sha256: str | None = key(
        None, "Expected SHA-256 of the text (docs/data.md). null accepts any text."
    )
    block_size: PositiveInt = key(64, "Context length.", "tokens")
    stride: PositiveInt | None = key(
        None,
        "Distance from the start of a window to the start of the next. null uses data.block_size.",
        "tokens",
    )
    train_split: Annotated[float, Field(gt=0, lt=1)] = key(
        0.9, "Share of the text to train on, from its start."
    )
    test_split: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "Share of the text, at its end, that is measured once after training."
    )
    truncate: UnitInterval = key(
        1.0, "Share of the text to use, from its start. The rest is ignored."
    )
    cache_dir: str | None = neutral(
        None, "Local directory for encoded texts. null uses the user's cache directory."
    )
    verify: Literal["auto", "always"] = neutral(
        "auto",
        "always hashes all files at every start. auto hashes only files whose size, times or "
        "inode have changed.",
    )
    reader: str | None = key(
        None,
        "Your registered function that turns a path into text. null uses the built-in readers.",
    )
    tokenizer: str = key(
        "char", "char, byte, bpe (trained on the training split), or the path of a tokenizer.json."
    )
    end_token: bool = key(
        False,
        "Add a special token at the end of each document. A document is a record, one of "
        "several files, or a piece that your reader yields.",
    )
    vocab_size: Annotated[int, Field(ge=1, le=1 << 20)] | None = key(
        None,
        "Size of the vocabulary. For bpe: 257 or more; null means 4096. Required for "
        "data.format=tokens without a tokenizer.",
        "tokens",
    )
    dtype: Literal["uint16", "uint32"] | None = key(
        None, "For data.format=tokens: type of the numbers in files without a header."
    )
    sources: list[tuple[str, PositiveFloat]] | None = key(
        None,
        "Several texts with weights, instead of data.path: [[a.txt,3],[texts/,1]]. Windows "
        "are drawn from each text in proportion to its weight.",
    )
    val_paths: dict[str, str] | None = neutral(
        None, "Additional validation texts by name, as in {wiki: wiki.txt}.", changes="measurement"
    )
    split_paths: dict[str, str] | None = key(
        None,
        "Separate texts for validation and test, instead of shares of data.path, as in {val: "
        "a.txt, test: b.txt}.",
    )

    def __post_init__(self) -> None:
        sources = self.sources or []
        val_paths = self.val_paths or {}
        check(
            (self.path, self.sources, self.reader) != (None, None, None),
            "data.path is missing; set it to a text, or set data.sources to several texts",
        )
        if self.path is not None:
            check_url("data.path", self.path)
        check_url("data.tokenizer", self.tokenizer)
        for i, (path, _) in enumerate(sources):
            check_url(f"data.sources[{i}]", path)
        for name, path in val_paths.items():
            check_url(f"data.val_paths.{name}", path)
        if self.cache_dir is not None:
            check_directory("data.cache_dir", self.cache_dir)
        self._check_tokens()
        check(
            self.sources != [],
            "data.sources is empty; set it to pairs of a path and a weight, or to null",
        )
        check(
            self.column is None or self.format != "text" or self.reader is not None,
            f"data.column={self.column} needs a table, but data.format=text reads the whole file "
            "as text; leave one of them out",
        )
        check(
            self.reader is None or self.format in ("auto", "text"),
            f"data.reader={self.reader} decides itself how to read; leave out "
            f"data.format={self.format}",
        )
        total = sum(weight for _, weight in sources)
        check(
            math.isfinite(total),
            "the sum of the weights in data.sources is too large; use smaller weights, such as 3 "
            "and 1",
        )
        check(
            not (self.sources and self.sha256),
            "data.sha256 is the hash of data.path; set it to null with data.sources",
        )
        for name in val_paths:
            check(
                name.isidentifier() and name.isascii(),
                f"data.val_paths.{name}: the name must consist of letters, digits and _, and not "
                "begin with a digit",
            )
        check(
            self.train_split + self.test_split < 1,
            f"data.test_split={self.test_split} leaves nothing to validate on; lower it or "
            "data.train_split",
        )
        check(
            self.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", self.sha256),
            f"data.sha256={self.sha256} must be 64 lower-case hexadecimal digits or null",
        )
        self._check_split_paths()

    def _check_split_paths(self) -> None:
        given = self.split_paths or {}
        for name, path in given.items():
            check(
                name in SPLITS_WITH_OWN_TEXT,
                f"data.split_paths.{name}: the split must be val or test; set the training text "
                "as data.path, and additional validation texts as data.val_paths",
            )
            check_url(f"data.split_paths.{name}", path)
        check(
            not (given and self.test_split),
            f"data.test_split={self.test_split} cannot be combined with data.split_paths; name "
            "the test text there, as in {test: b.txt}",
        )

    def _check_tokens(self) -> None:
        is_tokens = self.format == "tokens"
        size = self.vocab_size
        needs_size = self.tokenizer == "bpe" or (is_tokens and self.tokenizer == "char")
        check(
            size is None or needs_size,
            f"data.vocab_size={size} needs data.tokenizer=bpe, or data.format=tokens without a "
            "data.tokenizer",
        )
        is_too_small = self.tokenizer == "bpe" and size is not None and size < MIN_BPE_VOCAB_SIZE
        check(
            not is_too_small,
            f"data.vocab_size={size} must be {MIN_BPE_VOCAB_SIZE} or more with data.tokenizer=bpe",
        )
        check(self.dtype is None or is_tokens, f"data.dtype={self.dtype} needs data.format=tokens")
        check(
            not (is_tokens and self.reader),
            f"data.reader={self.reader} yields text, not tokens; leave it out with "
            "data.format=tokens",
        )

    @property
    def source(self) -> str:
        """The key that locates the text, with its value, for messages: data.path=a.txt."""
        if self.path is None:
            return f"data.reader={self.reader}"
        return f"data.{'sources' if self.sources else 'path'}={self.path}"

    @property
    def label(self) -> str:
        """The name of the text in directories and logs."""
        if self.name:
            return self.name
        paths = [path for path, _ in self.sources or ()] or [self.path or ""]
        stems = []
        for path in paths:
            without_query = path.removeprefix(BUILTIN_PREFIX).partition("?")[0]
            stems.append(PurePosixPath(without_query).stem)
        return "+".join(filter(None, stems)) or "text"


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(UserCodeConfig):
    """The keys of every map-style dataset that a user's code registers (mingpt_ddp/data)."""

    name: str = neutral(..., "Label of the dataset in directory names and logs.")
    dataset: str = key(..., "Name of the dataset, which your code registers.")
    num_workers: NonNegativeInt = neutral(
        0,
        "Number of processes per rank that load samples, at most 16 per core. 0 loads them in"
        " the rank itself.",
    )
    pin_memory: bool = neutral(
        True, "Load batches into page-locked memory, from which a GPU copies faster."
    )

    @property
    def label(self) -> str:
        """The name of the dataset in directories and logs."""
        return self.name
