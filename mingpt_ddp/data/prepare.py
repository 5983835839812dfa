"""Find texts in the cache, or fetch and encode them: once per machine, by their content."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

from mingpt_ddp.config.keys.components import GIVEN_SPLITS, DataConfig, Form
from mingpt_ddp.data.dataset import EncodedText, RecordedText
from mingpt_ddp.data.known_files import digest_of
from mingpt_ddp.data.locate_tokens import locate
from mingpt_ddp.data.text.encode_text import encode, is_divided
from mingpt_ddp.data.text.opened_text import Text, sha256_of_all
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.text.texts import open_source
from mingpt_ddp.data.tokenizers.chosen_tokenizer import (
    check_same_tokenizer,
    given_tokenizer,
    with_end,
)
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.errors import DataError, UserError

# Keys of data for one of several texts.
ONE_TEXT: dict[str, Any] = dict.fromkeys(("sources", "val_paths", "split_paths", "sha256"))


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
        encoded = _prepare_all(config, tokenizer, cache, recorded)
    except UserError:
        cache.discard()
        raise
    cache.keep_records()
    return encoded


def sha256_of_text(config: DataConfig) -> str:
    """Return the SHA-256 of a training text as a new run records it, without encoding the text.

    A large file that an earlier start has read is not read again.

    Raises:
        ConfigError, DataError: As `prepare_all`.
    """
    cache = TextCache(config)
    texts = _open_all(config, cache, form=None, by_name=config.split_paths is None)
    cache.keep_records()
    return sha256_of_all(texts)


def _prepare_all(
    config: DataConfig, tokenizer: Tokenizer | None, cache: TextCache, recorded: RecordedText | None
) -> dict[str, EncodedText]:
    if tokenizer is not None:
        check_same_tokenizer(config, tokenizer)
    if recorded is None:
        _check_val_paths(config)
    tokenizer = tokenizer or given_tokenizer(config)
    form = recorded.form if recorded else None
    by_name = recorded.by_name if recorded else config.split_paths is None
    texts = _open_all(config, cache, form, by_name)
    is_new = recorded is None or sha256_of_all(texts) != recorded.sha256
    if recorded is not None and is_new:  # other texts, of which nothing is recorded
        texts = _open_all(config, cache, form=None, by_name=False)
    form = texts[0].form
    by_name = config.split_paths is None and any(text.split for text in texts)
    train_text = _prepare(texts, config, tokenizer, cache, is_new)
    encoded = {"": replace(train_text, by_name=by_name)}
    tokenizer = tokenizer_from_state(train_text.tokenizer)
    for name, path in (config.val_paths or {}).items():
        one = replace(config, path=path, truncate=1.0, **ONE_TEXT)
        try:
            texts = _open(one, path, cache, None if is_new else form)
            _check_same_form(texts, form)
            encoded[name] = _prepare(texts, one, tokenizer, cache, is_new)
        except DataError as error:
            raise DataError(f"data.val_paths.{name}: {error.args[0]}") from error
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
    texts: list[Text],
    config: DataConfig,
    tokenizer: Tokenizer | None,
    cache: TextCache,
    is_new: bool,
) -> EncodedText:
    """Find texts in the cache, or encode them; those of a new run must look like texts."""
    for text in texts:
        if is_new and config.format == "auto":
            text.contents.refuse()
        text.contents.log_summary()
    if tokenizer is not None:
        tokenizer = with_end(tokenizer, config)
    encoded = _find_or_encode(texts, config, tokenizer, cache)
    for text in texts:
        text.contents.report_form()
    return encoded


def _find_or_encode(
    texts: list[Text], config: DataConfig, tokenizer: Tokenizer | None, cache: TextCache
) -> EncodedText:
    sha256 = sha256_of_all(texts)
    form = texts[0].form
    if form == "tokens":
        assert tokenizer is not None
        return locate(texts, config, tokenizer, cache)
    key = sha256
    # The encoding depends on more keys.
    if is_divided(texts, config, tokenizer) or tokenizer or config.end_token:
        chosen = tokenizer.state() if tokenizer else [config.tokenizer, config.vocab_size]
        shares = [config.truncate, config.train_split, config.test_split]
        # files of one text, or by their names, may have the digest of several or given texts
        splits = [text.split for text in texts]
        division = [bool(config.sources), config.split_paths is None, splits]
        key = digest_of([sha256, chosen, *shares, config.end_token, division])
    if form != "text":
        key = digest_of([key, form, config.column])
    return cache.find_or_add(key, sha256, partial(encode, texts, config, tokenizer, cache))


def _open_all(config: DataConfig, cache: TextCache, form: Form | None, by_name: bool) -> list[Text]:
    """Open the one text, or those of `data.sources`, and those of `data.split_paths`.

    What is new must look like a text, or like data of one format.

    Args:
        form: what `data.format=auto` stood for when a run began; None: it is decided now.
        by_name: let names of files say their splits.

    Raises:
        DataError: as `prepare_all`.
    """
    given = config.split_paths or {}
    texts: list[Text] = []
    if config.sources is None:
        texts += _open(config, config.source, cache, form, by_name)
    for path, weight in config.sources or ():
        # Build one source only: each configuration is validated, of thousands.
        one = replace(config, path=path, sources=[(path, weight)])
        texts += _open(one, one.source, cache, form, by_name)
    if config.test_split and any(text.split for text in texts):
        raise DataError(
            f"{config.source} has files whose names say their splits; leave out "
            f"data.test_split={config.test_split}, or set data.split_paths={{}} to divide all"
        )
    if "val" in given:
        texts = [replace(text, split="train") for text in texts]
    for name in sorted(given, reverse=True):  # val, test
        one = replace(config, path=given[name], **ONE_TEXT)
        [text] = _open(one, f"data.split_paths.{name}={one.path}", cache, form)
        texts.append(replace(text, split=name))
    _check_same_form(texts, texts[0].form)
    return texts


def _check_same_form(texts: list[Text], form: Form) -> None:
    for text in texts:
        if text.form != form:
            raise DataError(
                f"{text.source} looks like data.format={text.form}, the first text like "
                f"{form}; give texts of one format, or set data.format to read all by it"
            )


def _open(
    config: DataConfig, source: str, cache: TextCache, form: Form | None, by_name: bool = False
) -> list[Text]:
    """Find a text, or those of its splits, and their SHA-256.

    Args:
        source: what messages call the text.
        form: of `data.format=auto`; None: the text is new, and its format that of its content.
    """
    if config.format != "auto":
        form = config.format
    try:
        texts = open_source(config, source, cache, form, by_name)
        for text in texts:
            # Refuse before all of it is read.
            if form is None:
                text.contents.refuse()
            elif form == "text":
                _refuse_holes(text)
        return cache.hashed(config, texts)
    except FileNotFoundError as error:
        raise DataError(f"{source}: there is no such file") from error
    except UserError:
        raise
    except Exception as error:  # exceptions differ by protocol
        reason = str(error) or type(error).__name__
        message = f"cannot read {source} ({reason[:200]})"
        if "://" in source:
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
