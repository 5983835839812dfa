"""The keys of the task and the data, which users can extend with a Python file.

So can they the model, in model_config.py, and the optimizer, in optimizer_config.py. The table of
all groups is in schema.py.
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

GIVEN_SPLITS = ("val", "test")  # which may have texts of their own
MIN_BPE = 257  # tokens: all bytes, and one that is learnt
BUILTIN_PREFIX = "builtin:"  # of a text that ships with Python
Form: TypeAlias = Literal["auto", "text", "jsonl", "parquet", "csv", "tokens"]


@dataclass(frozen=True, kw_only=True)
class UserCodeConfig:
    """A group that users can extend with their own Python file (mingpt_ddp/config/builders.py)."""

    code: str | None = neutral(None, "your Python file, relative to the YAML file that names it")

    def __post_init__(self) -> None:
        """Check what several keys must satisfy together; subclasses override this."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(UserCodeConfig):
    """What the model learns: batch -> loss and metrics (mingpt_ddp/tasks)."""

    name: str = key(
        "language_model",
        "the registered task: language_model or your own",
    )


@dataclass(frozen=True, kw_only=True)
class ClassesConfig(TaskConfig):
    """A task whose targets are classes: the next token, or a label."""

    label_smoothing: DecayFactor = key(
        0.0, "share of a target spread over all classes, in training alone"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(UserCodeConfig):
    """Which text, and how it is split and cut into windows (mingpt_ddp/data/dataset.py)."""

    name: str | None = neutral(
        None, "a label for directories and logs; null: the file name of path"
    )
    path: str | None = key(
        None, "a file, any fsspec URL, or builtin:python_docs; a reader may read it otherwise"
    )
    format: Form = neutral(
        "auto",
        "text, jsonl, parquet, csv or tokens; auto: by name or content, at the first start; text "
        "takes any UTF-8 as it is",
        changes="training",
    )
    column: str | None = key(
        None, "of jsonl, parquet and csv, that holds the texts; null: the only one of strings"
    )
    sha256: str | None = key(None, "expected SHA-256 of the text (docs/data.md); null: any content")
    block_size: PositiveInt = key(64, "context length", "tokens")
    stride: PositiveInt | None = key(
        None, "between the starts of windows; null: block_size", "tokens"
    )
    train_split: Annotated[float, Field(gt=0, lt=1)] = key(
        0.9, "share of the text to train on, from its start"
    )
    test_split: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "share of the text to test on once, at its end"
    )
    truncate: UnitInterval = key(1.0, "share of the text to use at all, from its start")
    cache_dir: str | None = neutral(
        None, "local directory of encoded texts; null: the user's cache directory"
    )
    verify: Literal["auto", "always"] = neutral(
        "auto",
        "always: hash all files at every start; auto: those that have changed, by size, times "
        "and inode",
    )
    reader: str | None = key(None, "your registered function from path to text; null: UTF-8")
    tokenizer: str = key(
        "char", "char, byte, bpe (trained on the training split), or the path of a tokenizer.json"
    )
    end_token: bool = key(
        False,
        "end each document with a token of its own: a record, a file of several, or a piece that a "
        "reader yields",
    )
    vocab_size: Annotated[int, Field(ge=1, le=1 << 20)] | None = key(
        None,
        "of bpe, from 257 on; null: 4096. Of format=tokens without a tokenizer",
        "tokens",
    )
    dtype: Literal["uint16", "uint32"] | None = key(
        None, "of the tokens of format=tokens in files without a header"
    )
    sources: list[tuple[str, PositiveFloat]] | None = key(
        None,
        "texts instead of path, as [[a.txt,3],[texts/,1]]: windows are drawn from them by "
        "these weights",
    )
    val_paths: dict[str, str] | None = neutral(
        None, "further validation texts by name, as {wiki: wiki.txt}", changes="measurement"
    )
    split_paths: dict[str, str] | None = key(
        None, "texts to validate and to test on instead of shares, as {val: a.txt, test: b.txt}"
    )

    def __post_init__(self) -> None:
        sources = self.sources or []
        val_paths = self.val_paths or {}
        check(
            (self.path, self.sources, self.reader) != (None, None, None),
            "data.path is missing; give a text, or several as data.sources",
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
            self.sources != [], "data.sources is empty; give pairs of a path and a weight, or null"
        )
        check(
            self.column is None or self.format != "text" or self.reader is not None,
            f"data.column={self.column} needs a table; data.format=text reads texts as they are",
        )
        check(
            self.reader is None or self.format in ("auto", "text"),
            f"data.reader={self.reader} reads its text itself; leave out data.format={self.format}",
        )
        total = sum(weight for _, weight in sources)
        check(
            math.isfinite(total),
            "the weights of data.sources have no finite sum; give smaller ones, as in 3 and 1",
        )
        check(
            not (self.sources and self.sha256),
            "data.sha256 is of data.path; set it to null with data.sources",
        )
        for name in val_paths:
            check(
                name.isidentifier() and name.isascii(),
                f"data.val_paths.{name}: a name is of letters, digits and _",
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
                name in GIVEN_SPLITS,
                f"data.split_paths.{name}: a split is val or test; the training text is data.path, "
                "further texts to validate on are data.val_paths",
            )
            check_url(f"data.split_paths.{name}", path)
        check(
            not (given and self.test_split),
            f"data.test_split={self.test_split} does not go with data.split_paths; name the test "
            "text there, as test: b.txt",
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
        is_too_small = self.tokenizer == "bpe" and size is not None and size < MIN_BPE
        check(not is_too_small, f"data.vocab_size={size} of bpe must be {MIN_BPE} or more")
        check(self.dtype is None or is_tokens, f"data.dtype={self.dtype} needs data.format=tokens")
        check(
            not (is_tokens and self.reader),
            f"data.reader={self.reader} yields text; leave it out with data.format=tokens",
        )

    @property
    def source(self) -> str:
        """The key that says where the one text is, with its value, for messages."""
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
    """The keys of every map-style dataset of samples, which users register (mingpt_ddp/data)."""

    name: str = neutral(..., "a label for directories and logs")
    dataset: str = key(..., "the dataset to build, which your code registers")
    num_workers: NonNegativeInt = neutral(
        0, "processes per rank that load samples, at most 16 per core; 0: the rank"
    )
    pin_memory: bool = neutral(True, "load batches into page-locked memory, for a GPU")

    @property
    def label(self) -> str:
        """The name of the dataset in directories and logs."""
        return self.name
