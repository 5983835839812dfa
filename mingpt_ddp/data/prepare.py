"""From `data.path` to token files: find texts in the cache, or read and encode them once.

`files_of` lists the files of a text. If the cache has a directory for them, no file is read. Else
`Text.look` decides the format, `Text.measure` hashes the text and counts its characters, and
`encode` writes the tokens.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from mingpt_ddp.config.keys.components import SPLITS_WITH_OWN_TEXT, DataConfig, Form
from mingpt_ddp.data.dataset import EncodedText, RecordedText
from mingpt_ddp.data.locate_tokens import locate
from mingpt_ddp.data.text.encode import encode, is_divided
from mingpt_ddp.data.text.text import Text, sha256_of_all
from mingpt_ddp.data.text.text_cache import CachedText, TextCache
from mingpt_ddp.data.tokenizers.chosen_tokenizer import (
    check_same_tokenizer,
    given_tokenizer,
    with_end,
)
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.errors import DataError, UserError

# Keys of data for one of several texts.
ONE_TEXT: dict[str, Any] = dict.fromkeys(("sources", "val_paths", "split_paths", "sha256"))
SETTLED_NS = 2_000_000_000  # the longest tick of a file system's clock, on FAT


def prepare_all(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    cache: TextCache | None = None,
    recorded: RecordedText | None = None,
) -> dict[str, EncodedText]:
    """Return the training text as "", and those of `data.val_paths` by name.

    The tokenizer of the training text encodes all of them.

    Args:
        tokenizer: The one of a snapshot, or None for the one of `data.tokenizer`.
        cache: Notes what this call adds. None opens the cache of `data.cache_dir`.
        recorded: The text of the snapshot that the run resumes from, if it has one. Its texts are
            read whatever they look like.

    Raises:
        ConfigError: the tokenizer needs a library that is not installed.
        DataError: a text cannot be read, does not look like a text, has another SHA-256 than
            `data.sha256`, or cannot be encoded; or there are no two distinct characters to learn.
    """
    cache = cache or TextCache(config)
    try:
        return _prepare_all(config, tokenizer, cache, recorded)
    except UserError:
        cache.discard()
        raise


def sha256_of_text(config: DataConfig) -> str:
    """Return the SHA-256 of a training text as a new run records it, without encoding the text.

    The text is not read if the cache has its tokens, encoded with the same settings.

    Raises:
        ConfigError, DataError: As `prepare_all`.
    """
    return Texts(config, given_tokenizer(config), TextCache(config)).sha256()


def _prepare_all(
    config: DataConfig, tokenizer: Tokenizer | None, cache: TextCache, recorded: RecordedText | None
) -> dict[str, EncodedText]:
    if tokenizer is not None:
        check_same_tokenizer(config, tokenizer)
    if recorded is None:
        _check_val_paths(config)
    tokenizer = tokenizer or given_tokenizer(config)
    text = _recorded_text(config, tokenizer, cache, recorded) if recorded else None
    is_new = text is None
    text = text or Texts(config, tokenizer, cache).encoded()
    encoded = {"": text}
    tokenizer = tokenizer_from_state(text.tokenizer)
    for name, path in (config.val_paths or {}).items():
        one = replace(config, path=path, truncate=1.0, **ONE_TEXT)
        try:
            if is_new:
                texts = Texts(one, tokenizer, cache, None, path, text.form)
            else:
                texts = _kept(one, tokenizer, cache, text.form, path)
            encoded[name] = texts.encoded()
        except DataError as error:
            raise DataError(f"data.val_paths.{name}: {error.args[0]}") from error
    return encoded


def _check_val_paths(config: DataConfig) -> None:
    """Refuse names of splits, which are meant for `data.split_paths`, in a new run."""
    for name in config.val_paths or {}:
        if name in SPLITS_WITH_OWN_TEXT:
            raise DataError(
                f"data.val_paths.{name}: to replace the {name} split of data.path by this text, "
                "give it as data.split_paths; to measure it besides, name it otherwise"
            )


def _recorded_text(
    config: DataConfig, tokenizer: Tokenizer | None, cache: TextCache, recorded: RecordedText
) -> EncodedText | None:
    """Return the text of a snapshot in the format of its first start. None if it has changed."""
    texts = _kept(config, tokenizer, cache, recorded.form)
    with suppress(DataError):  # raised for a changed text, which is then read as a new one
        if texts.sha256() == recorded.sha256:
            return texts.encoded()
    return None


def _kept(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    cache: TextCache,
    form: Form,
    source: str = "",
) -> "Texts":
    """Return texts to read in the format of a snapshot.

    Use the directory that a new run with the same texts has made, if it has this format.
    """
    texts = Texts(config, tokenizer, cache, source=source)
    entry = cache.find(texts.directory)
    if entry is None or entry.text.form != form:
        return Texts(config, tokenizer, cache, form, source)
    texts.kept = form
    return texts


class Texts:
    """The one text, or those of `data.sources`, and those of `data.split_paths`."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer | None,
        cache: TextCache,
        kept: Form | None = None,
        source: str = "",
        form: str = "",
    ) -> None:
        """
        Args:
            tokenizer: None if it is learnt from the text.
            kept: The format in a snapshot, or None for a new run. The texts are then read in it,
                whatever they look like.
            source: Name of the text in messages. "" for its key and value.
            form: The format that the training text has, if this is a further validation text.
        """
        self.config = config
        self.cache = cache
        self.kept = kept
        self.tokenizer = with_end(tokenizer, config) if tokenizer else None
        self._form = form
        given = config.split_paths or {}
        split = "train" if "val" in given else ""
        self.texts = []
        if config.sources is None:
            self.texts.append(_open(config, source or config.source, split, cache))
        for path, weight in config.sources or ():
            # Give each config one source only: it validates all, and there may be thousands.
            one = replace(config, path=path, sources=[(path, weight)])
            self.texts.append(_open(one, one.source, split, cache))
        for name in sorted(given, reverse=True):  # val, test
            one = replace(config, path=given[name], **ONE_TEXT)
            self.texts.append(_open(one, f"data.split_paths.{name}={one.path}", name, cache))
        key = [text.key() for text in self.texts]
        shares: list[Any] = []
        if is_divided(self.texts, config, self.tokenizer) or config.format == "tokens":
            shares = [config.truncate, config.train_split, config.test_split, bool(config.sources)]
        chosen = self.tokenizer.state() if self.tokenizer else [config.tokenizer, config.vocab_size]
        self.directory = cache.directory([key, kept, chosen, shares])
        self._sha256 = ""

    def _shared_files(self) -> list[str]:
        """Return a note if a file is in two splits: its text is trained on and measured."""
        first: dict[str, Text] = {}
        for text in self.texts:
            for file in map(str, text.files or []):
                other = first.setdefault(file, text)
                if other.split != text.split:
                    return [f"{text.source} and {other.source} have a file in common: {file}"]
        return []

    def found(self) -> CachedText | None:
        """Return the entry of these texts in the cache. None if the texts must be read first."""
        entry = self.cache.find(self.directory)
        return entry if entry and entry.is_settled and not self.cache.reads_all else None

    def sha256(self) -> str:
        """Return the SHA-256 of the texts. Read them unless the cache knows it."""
        if entry := self.found():
            return entry.text.sha256
        if not self._sha256:
            for text in self.texts:
                self._look(text)
            for text in self.texts:
                with _errors_of_reading(text.source):
                    text.measure()
            self._sha256 = sha256_of_all(self.texts)
        return self._sha256

    def _look(self, text: Text) -> None:
        is_given = self.config.split_paths is not None or self._form != ""
        with _errors_of_reading(text.source):
            text.look(self.kept, checks_splits=self.kept is None and not is_given)
        form = self._form or self.texts[0].form
        if text.form != form:
            raise DataError(
                f"{text.source} looks like data.format={text.form}, but the first text "
                f"looks like {form}; give texts of one format, or set data.format to one for all"
            )

    def encoded(self) -> EncodedText:
        """Return the encoded texts in the cache. One process encodes them; the others wait.

        Raises:
            DataError: As `prepare_all`.
        """
        entry = self.found()
        if entry is None:
            with self.cache.locked():
                entry = self.found() or self._add()
        self._check_sha256(entry.text.sha256)
        return entry.text

    def _add(self) -> CachedText:
        """Read the texts, and encode them unless the cache has these very texts."""
        settled_ns = time.time_ns() - SETTLED_NS
        sha256 = self.sha256()
        self._check_sha256(sha256)
        is_settled = max(text.newest_ns for text in self.texts) < settled_ns
        entry = self.cache.find(self.directory)
        if entry is not None and entry.text.sha256 == sha256:
            if is_settled and not entry.is_settled:
                self.cache.settle(entry)
            return entry
        with self.cache.adding(self.directory, sha256) as directory:
            make = locate if self.texts[0].form == "tokens" else encode
            encoded = make(self.texts, self.config, self.tokenizer, directory)
            files = [name for text in self.texts for name in text.names()]
            notes = [note for text in self.texts for note in text.notes()]
            notes += self._shared_files()
            encoded = replace(encoded, directory=str(self.directory), notes=notes)
            entry = CachedText(encoded, is_settled, files)
            self.cache.write(entry, directory)
        return entry

    def _check_sha256(self, sha256: str) -> None:
        expected = self.config.sha256
        if expected not in (None, sha256):
            self.cache.forget(self.texts[0].files or [])
            raise DataError(
                f"{self.config.source} has SHA-256 {sha256}, not data.sha256={expected}; "
                "set data.sha256=null to use it anyway"
            )


def _open(config: DataConfig, source: str, split: str, cache: TextCache) -> Text:
    """Find the files of a text; download those at a URL."""
    with _errors_of_reading(source):
        return Text(config, source, split, cache)


@contextmanager
def _errors_of_reading(source: str) -> Iterator[None]:
    """Turn an exception of a file system into one line. Its type depends on the protocol."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{source}: there is no such file") from error
    except UserError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        message = f"cannot read {source} ({reason[:200]})"
        if "://" in source:
            message += "; without a network, name a local copy"
        raise DataError(message) from error
