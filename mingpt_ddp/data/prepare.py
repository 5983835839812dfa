"""Turn `data.path` into token files: find texts in the cache, or read and encode them once.

`files_of` lists the files of a text. If the cache has a directory for them, no file is read.
Otherwise `Text.decide_format` finds out how to read them, `Text.measure` hashes the text and counts
its characters, and `encode` writes the tokens.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from mingpt_ddp.config.keys.components import SPLITS_WITH_OWN_TEXT, DataConfig, TextFormat
from mingpt_ddp.data.dataset import EncodedText, RecordedText
from mingpt_ddp.data.locate_tokens import locate
from mingpt_ddp.data.text.encode import encode, is_split_before_encoding
from mingpt_ddp.data.text.text import Text, sha256_of_all
from mingpt_ddp.data.text.text_cache import CachedText, TextCache
from mingpt_ddp.data.tokenizers.chosen_tokenizer import (
    check_same_tokenizer,
    given_tokenizer,
    with_end,
)
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.errors import DataError, UserError

# Settings that reduce a data configuration to a single text.
ONE_TEXT: dict[str, Any] = dict.fromkeys(("sources", "val_paths", "split_paths", "sha256"))
# The longest tick of any file system's clock is two seconds, on FAT. If a file is older than that,
# any later write changes its time.
SETTLED_NS = 2_000_000_000


def prepare_all(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    cache: TextCache | None = None,
    recorded: RecordedText | None = None,
) -> dict[str, EncodedText]:
    """Prepare the training text and the further validation texts of `data.val_paths`.

    The tokenizer of the training text encodes all of them.

    Args:
        config: The settings of the data.
        tokenizer: The tokenizer of a snapshot, or None for the one that `data.tokenizer` names.
        cache: The cache of encoded texts, which keeps track of the entries that this call adds.
            None opens the cache in `data.cache_dir`.
        recorded: The training text of the snapshot that the run resumes from, or None in a new run.
            Texts are read in its format, even if they look like another format.

    Returns:
        The training text under the key "", and each further validation text under its name.

    Raises:
        ConfigError: The tokenizer needs a library that is not installed.
        DataError: A text cannot be read, does not look like a text, has another SHA-256 than
            `data.sha256`, or cannot be encoded. Or the training text consists of a single distinct
            character, so that there is nothing to learn.
    """
    cache = cache or TextCache(config)
    try:
        return _prepare_all(config, tokenizer, cache, recorded)
    except UserError:
        cache.discard()
        raise


def sha256_of_text(config: DataConfig) -> str:
    """Compute the SHA-256 that a new run would record for its training text.

    The text is not encoded. It is not even read if the cache has its tokens for these settings.

    Raises:
        ConfigError, DataError: The text cannot be prepared. `prepare_all` lists the reasons.
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
                texts = _texts_in_recorded_form(one, tokenizer, cache, text.form, path)
            encoded[name] = texts.encoded()
        except DataError as error:
            raise DataError(f"data.val_paths.{name}: {error.args[0]}") from error
    return encoded


def _check_val_paths(config: DataConfig) -> None:
    """Refuse the name of a split in `data.val_paths`. It belongs in `data.split_paths`."""
    for name in config.val_paths or {}:
        if name in SPLITS_WITH_OWN_TEXT:
            raise DataError(
                f"data.val_paths.{name} has the name of a split; to replace the {name} split of "
                "data.path by this text, give it as data.split_paths; to measure the loss on it "
                "too, give it another name"
            )


def _recorded_text(
    config: DataConfig, tokenizer: Tokenizer | None, cache: TextCache, recorded: RecordedText
) -> EncodedText | None:
    """Prepare the training text of a snapshot, in the recorded format.

    Return None if the text has changed since the snapshot was saved.
    """
    texts = _texts_in_recorded_form(config, tokenizer, cache, recorded.form)
    # A changed text may raise DataError. It is then read as a new text.
    with suppress(DataError):
        if texts.sha256() == recorded.sha256:
            return texts.encoded()
    return None


def _texts_in_recorded_form(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    cache: TextCache,
    form: TextFormat,
    source: str = "",
) -> "Texts":
    """Open texts that are to be read in the format that a snapshot has recorded.

    If a new run has cached the same texts in this format, that entry of the cache is used.
    """
    texts = Texts(config, tokenizer, cache, source=source)
    entry = cache.find(texts.directory)
    if entry is None or entry.text.form != form:
        return Texts(config, tokenizer, cache, form, source)
    texts.recorded_form = form
    return texts


class Texts:
    """Texts that are encoded together, into one directory of the cache.

    They are the text of `data.path` or the texts of `data.sources`, and the texts of
    `data.split_paths`.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer | None,
        cache: TextCache,
        recorded_form: TextFormat | None = None,
        source: str = "",
        form: str = "",
    ) -> None:
        """
        Args:
            config: The settings of the data.
            tokenizer: The tokenizer, or None if it is learnt from the texts.
            cache: The cache of encoded texts.
            recorded_form: The format in the snapshot to resume, or None in a new run. The texts are
                read in this format, even if they look like another format.
            source: Name of the text in messages. If it is "", messages show the key and its value.
            form: If this is a further validation text, the format of the training text. Else "".
        """
        self.config = config
        self.cache = cache
        self.recorded_form = recorded_form
        self.tokenizer = with_end(tokenizer, config) if tokenizer else None
        self._form = form
        given = config.split_paths or {}
        split = "train" if "val" in given else ""
        self.texts = []
        if config.sources is None:
            self.texts.append(_open(config, source or config.source, split, cache))
        for path, weight in config.sources or ():
            # Give each configuration a single source. A configuration validates all of its sources,
            # and there may be thousands of them.
            one = replace(config, path=path, sources=[(path, weight)])
            self.texts.append(_open(one, one.source, split, cache))
        for name in sorted(given, reverse=True):  # val, test
            one = replace(config, path=given[name], **ONE_TEXT)
            self.texts.append(_open(one, f"data.split_paths.{name}={one.path}", name, cache))
        key = [text.key() for text in self.texts]
        shares: list[Any] = []
        if (
            is_split_before_encoding(self.texts, config, self.tokenizer)
            or config.format == "tokens"
        ):
            shares = [config.truncate, config.train_split, config.test_split, bool(config.sources)]
        chosen = self.tokenizer.state() if self.tokenizer else [config.tokenizer, config.vocab_size]
        self.directory = cache.directory([key, recorded_form, chosen, shares])
        self._sha256 = ""

    def _shared_files(self) -> list[str]:
        """Return a note for the log if a file is in two splits.

        The model is then evaluated on a text that it has been trained on.
        """
        first: dict[str, Text] = {}
        for text in self.texts:
            for file in map(str, text.files or []):
                other = first.setdefault(file, text)
                if other.split != text.split:
                    return [f"{text.source} and {other.source} have a file in common: {file}"]
        return []

    def found(self) -> CachedText | None:
        """Look up these texts in the cache. Return None if they must be read first."""
        entry = self.cache.find(self.directory)
        return entry if entry and entry.is_settled and not self.cache.reads_all else None

    def sha256(self) -> str:
        """Compute the SHA-256 of the texts. They are read only if the cache does not know it."""
        if entry := self.found():
            return entry.text.sha256
        if not self._sha256:
            for text in self.texts:
                self._decide_format(text)
            for text in self.texts:
                with _errors_of_reading(text.source):
                    text.measure()
            self._sha256 = sha256_of_all(self.texts)
        return self._sha256

    def _decide_format(self, text: Text) -> None:
        """Decide the format of a text, which must be the same for all texts.

        Raises:
            DataError: The text cannot be read, or it has another format than the first text.
        """
        is_given = self.config.split_paths is not None or self._form != ""
        with _errors_of_reading(text.source):
            text.decide_format(
                self.recorded_form, checks_splits=self.recorded_form is None and not is_given
            )
        form = self._form or self.texts[0].form
        if text.form != form:
            raise DataError(
                f"{text.source} looks like data.format={text.form}, but the first text "
                f"looks like {form}; give texts of one format, or set data.format to the format "
                "of all texts"
            )

    def encoded(self) -> EncodedText:
        """Return the encoded texts.

        If the cache lacks them, one process encodes them while other processes wait.

        Raises:
            DataError: The texts cannot be prepared. `prepare_all` lists the reasons.
        """
        entry = self.found()
        if entry is None:
            with self.cache.locked():
                entry = self.found() or self._add()
        self._check_sha256(entry.text.sha256)
        return entry.text

    def _add(self) -> CachedText:
        """Read the texts, and add them to the cache unless it has them with the same SHA-256."""
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
        """Refuse texts that have another SHA-256 than `data.sha256`.

        Their downloads are deleted, so that the next start downloads them again.

        Raises:
            DataError: The hashes differ.
        """
        expected = self.config.sha256
        if expected not in (None, sha256):
            self.cache.forget(self.texts[0].files or [])
            raise DataError(
                f"{self.config.source} has SHA-256 {sha256}, not data.sha256={expected}; "
                "set data.sha256=null to use it anyway"
            )


def _open(config: DataConfig, source: str, split: str, cache: TextCache) -> Text:
    """Find the files of a text. Files at a URL are downloaded."""
    with _errors_of_reading(source):
        return Text(config, source, split, cache)


@contextmanager
def _errors_of_reading(source: str) -> Iterator[None]:
    """Turn an exception of a file system, whose type depends on the protocol, into a DataError.

    Args:
        source: Name of the text in messages.

    Raises:
        DataError: A file is missing or cannot be read.
    """
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
            message += "; if there is no network, name a local copy"
        raise DataError(message) from error
