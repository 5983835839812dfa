"""Find texts in the cache, or fetch and encode them: once per machine, by their content."""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mingpt_ddp.config.keys.components import GIVEN_SPLITS, DataConfig, Form
from mingpt_ddp.data.dataset import EncodedText, RecordedText
from mingpt_ddp.data.file_records import Sha256, digest_of, file_status
from mingpt_ddp.data.locate_tokens import locate
from mingpt_ddp.data.text.contents import Counts
from mingpt_ddp.data.text.encode_text import Source, encode, is_divided
from mingpt_ddp.data.text.text_cache import TextCache, sha256_of, sha256_of_splits
from mingpt_ddp.data.text.texts import Text, open_source, reading_keys
from mingpt_ddp.data.tokenizers.chosen_tokenizer import (
    check_same_tokenizer,
    given_tokenizer,
    with_end,
)
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.errors import DataError, UserError

ONE_TEXT: dict[str, Any] = {  # keys of data for one of several texts
    "sources": None,
    "val_paths": None,
    "split_paths": None,
    "sha256": None,
}


@dataclass(frozen=True)
class Reading:
    """What is found by reading a text."""

    sha256: Sha256
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class SplitConfig(DataConfig):
    """The configuration of a text of `data.split_paths`."""

    split: str

    @property
    def source(self) -> str:
        return f"data.split_paths.{self.split}={self.path}"


def prepare_all(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    cache: TextCache | None = None,
    recorded: RecordedText | None = None,
) -> dict[str, EncodedText]:
    """Return the training text as "", and those of `data.val_paths` by name.

    The tokenizer of the training text encodes all of them.

    Args:
        tokenizer: the one of a snapshot; None: that of `data.tokenizer`.
        cache: notes what is added; None: that of `data.cache_dir`.
        recorded: of a snapshot, which goes on with its texts.

    Raises:
        ConfigError: the tokenizer needs a library that is not installed.
        DataError: a text cannot be read, does not look like a text, has another SHA-256 than
            `data.sha256`, or cannot be encoded; or there are no two distinct characters to learn.
    """
    cache = cache or TextCache(config)
    try:
        if tokenizer is not None:
            check_same_tokenizer(config, tokenizer)
        if recorded is None:
            _check_val_paths(config)
        tokenizer = tokenizer or given_tokenizer(config)
        form = recorded.form if recorded else None
        by_name = recorded.by_name if recorded else config.split_paths is None
        sources = _open_all(config, cache, form, by_name)
        is_new = recorded is None or _sha256_of(sources) != recorded.sha256
        if recorded is not None and is_new:  # other texts, of which nothing is recorded
            sources = _open_all(config, cache)
        form = sources[0].text.form
        by_name = config.split_paths is None and any(source.split for source in sources)
        of_training = _prepare(sources, config, tokenizer, cache, is_new)
        encoded = {"": replace(of_training, by_name=by_name)}
        tokenizer = tokenizer_from_state(encoded[""].tokenizer)
        for name, path in (config.val_paths or {}).items():
            text = replace(config, path=path, truncate=1.0, **ONE_TEXT)
            try:
                sources = _open_all(text, cache, None if is_new else form)
                _check_same_form(sources, form)
                encoded[name] = _prepare(sources, text, tokenizer, cache, is_new)
            except DataError as error:
                message = str(error.args[0]).replace("data.path=", "")
                raise DataError(f"data.val_paths.{name}: {message}") from error
    except UserError:
        cache.discard()
        raise
    cache.keep_records()
    return encoded


def _check_val_paths(config: DataConfig) -> None:
    """Refuse names of splits, which are meant for `data.split_paths`, in a new run."""
    for name in config.val_paths or {}:
        if name in GIVEN_SPLITS:
            raise DataError(
                f"data.val_paths.{name}: to replace the {name} split of data.path by this text, "
                "give it as data.split_paths; to measure it besides, name it otherwise"
            )


def _prepare(
    sources: list[Source],
    config: DataConfig,
    tokenizer: Tokenizer | None,
    cache: TextCache,
    is_new: bool,
) -> EncodedText:
    """Find texts in the cache, or encode them; those of a new run must look like texts."""
    for source in sources:
        if is_new and config.format == "auto":
            source.text.contents.refuse()
        source.text.contents.report()
    if tokenizer is not None:
        tokenizer = with_end(tokenizer, config)
    encoded = _find_or_encode(sources, config, tokenizer, cache)
    for source in sources:
        source.text.contents.report_form()
    return encoded


def _find_or_encode(
    sources: list[Source], config: DataConfig, tokenizer: Tokenizer | None, cache: TextCache
) -> EncodedText:
    sha256 = _sha256_of(sources)
    if sources[0].text.tokens is not None:
        assert tokenizer is not None
        return locate(sources, config, tokenizer, cache, sha256)
    key = sha256
    # the encoding depends on more
    if is_divided(sources, config, tokenizer) or tokenizer or config.end_token:
        chosen = tokenizer.state() if tokenizer else [config.tokenizer, config.vocab_size]
        shares = [config.truncate, config.train_split, config.test_split]
        # files of one text, or by their names, may have the digest of several or given texts
        division = [bool(config.sources), config.split_paths is None, [s.split for s in sources]]
        key = digest_of([sha256, chosen, *shares, config.end_token, division])
    form = sources[0].text.form
    if form != "text":
        key = digest_of([key, form, config.column])
    directory = cache.directory(key)
    if cached := cache.read(directory, sha256):
        return cached
    with cache.locked():
        if cached := cache.read(directory, sha256):
            return cached
        with cache.adding(directory):
            return encode(sources, config, tokenizer, directory, sha256, cache)


def _sha256_of(sources: list[Source]) -> str:
    return sha256_of_splits([(source.split, source.sha256) for source in sources])


def _open_all(
    config: DataConfig, cache: TextCache, form: Form | None = None, by_name: bool = False
) -> list[Source]:
    """Open the one text, or those of `data.sources`, and those of `data.split_paths`.

    What is new must look like a text, or like data of one format.

    Args:
        form: what `data.format=auto` stood for when a run began; None: it is decided now.
        by_name: let names of files say their splits.

    Raises:
        DataError: as `prepare_all`.
    """
    if config.format != "auto":
        form = config.format
    given = config.split_paths or {}
    opened: list[Source] = []
    if config.sources is None:
        opened += _open(config, cache, form, by_name)
    for path, weight in config.sources or ():
        # one source: each of thousands of configurations is validated
        one = replace(config, path=path, sources=[(path, weight)])
        opened += _open(one, cache, form, by_name)
    if config.test_split and any(source.split for source in opened):
        raise DataError(
            f"{config.source} has files whose names say their splits; leave out "
            f"data.test_split={config.test_split}, or set data.split_paths={{}} to divide all"
        )
    if "val" in given:
        opened = [replace(source, split="train") for source in opened]
    for name in sorted(given, reverse=True):  # val, test
        values = {**vars(config), **ONE_TEXT, "path": given[name], "split": name}
        [text] = _open(SplitConfig(**values), cache, form)
        opened.append(replace(text, split=name))
    _check_same_form(opened, opened[0].text.form)
    return opened


def _check_same_form(sources: list[Source], form: Form) -> None:
    for source in sources:
        if source.text.form != form:
            raise DataError(
                f"{source.config.source} looks like data.format={source.text.form}, the first text "
                f"like {form}; give texts of one format, or set data.format to read all by it"
            )


def _open(
    config: DataConfig, cache: TextCache, form: Form | None, by_name: bool = False
) -> list[Source]:
    """Find a text, or those of its splits, and their SHA-256.

    Args:
        form: None: it is new, and its format that of its content.
    """

    def hash_texts(texts: dict[str, Text]) -> str:
        return _sha256_of(_hashed(config, cache, texts))

    try:
        texts = open_source(config, cache.root, cache.records, hash_texts, form, by_name)
        for text in texts.values():
            # before all of it is read
            if form is None:
                text.contents.refuse()
            elif form == "text":
                _refuse_holes(text)
        return _hashed(config, cache, texts)
    except FileNotFoundError as error:
        raise DataError(f"{config.source}: there is no such file") from error
    except UserError:
        raise
    except Exception as error:  # exceptions differ by protocol
        reason = str(error) or type(error).__name__
        message = f"cannot read {config.source} ({reason[:200]})"
        if "://" in config.source:
            message += "; without a network, name a local copy"
        raise DataError(message) from error


def _refuse_holes(text: Text) -> None:
    """Refuse a local text with holes, which may claim a terabyte and read as NUL bytes.

    Raises:
        DataError: names the file.
    """
    for path in text.files or ():
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:
                raise DataError(
                    f"{path} has holes, as an unfinished download does, and is not text; "
                    "copy it again"
                )


def _sha256(config: DataConfig, cache: TextCache, text: Text, again: bool = False) -> str:
    """Return the SHA-256 of a text, which need not be read if an earlier start has read it.

    Args:
        again: read it in any case.
    """

    def state() -> Any:
        return None if config.sha256 or text.files is None else file_status(text.files)

    def read() -> Reading:
        return Reading(sha256_of(text), text.contents.counts())

    part = text.contents.source.removeprefix(config.source)
    key = [reading_keys(config), text.form, part, [*map(os.path.abspath, text.files or ())]]
    found = cache.records.get(key, state, read, Reading, again)
    text.contents.restore(found.counts)
    return found.sha256


def _check_unchanged(config: DataConfig, cache: TextCache, text: Text, sha256: str) -> None:
    """Refuse a text whose SHA-256 is another one now than when it was opened."""
    if _sha256(config, cache, text, again=True) != sha256:
        cache.records.forget()  # the text may have been another one than was recorded
        raise DataError(f"{config.source} changed while being read; run again")


def _hashed(config: DataConfig, cache: TextCache, texts: dict[str, Text]) -> list[Source]:
    """Return texts with their SHA-256; raise DataError if it differs from `data.sha256`."""
    sources = []
    for split, text in texts.items():
        sha256 = _sha256(config, cache, text)
        check_unchanged = partial(_check_unchanged, config, cache, text, sha256)
        sources.append(Source(config, text, sha256, check_unchanged, split))
    sha256 = _sha256_of(sources)
    if config.sha256 not in (None, sha256):
        raise DataError(
            f"{config.source} has SHA-256 {sha256}, not data.sha256={config.sha256}; "
            "set data.sha256=null to use it anyway"
        )
    return sources
