"""The cache of encoded texts on this machine: locked, verified when read, and taken back."""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.download import DOWNLOADS, user_cache
from mingpt_ddp.data.known_files import (
    INVALID,
    RECORDS,
    FileRecords,
    Hash,
    Sha256,
    digest_of,
    file_status,
    settle,
)
from mingpt_ddp.data.text.contents import Counts
from mingpt_ddp.data.text.opened_text import (
    Text,
    bytes_of,
    hashes_of,
    sha256_of,
    sha256_of_all,
)
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import DataError, reason
from mingpt_ddp.storage.lock import LOCK, lock_now, log_if_long, open_lock
from mingpt_ddp.storage.storage import read_regular

FORMAT = 4
KEPT_SECONDS = 60.0  # a text that took longer to encode stays, even if its run is refused
MAX_META_BYTES = 1 << 25  # of meta.json, with the tokenizer
LONG_BYTES = 1 << 27  # of tokens that take longer to hash at the next start than to wait for once


@dataclass(frozen=True)
class Reading:
    """What is found by reading a text."""

    sha256: Sha256
    counts: Counts


class TextCache:
    """Directories of encoded texts, `data.cache_dir`, and what of them this object has added."""

    def __init__(self, config: DataConfig) -> None:
        self.root = Path(config.cache_dir) if config.cache_dir is not None else user_cache()
        self.records = FileRecords(self.root / RECORDS, uses=config.verify == "auto")
        self._added: list[Path] = []
        # The deepest directories come first.
        self._missing = [path for path in (self.root, *self.root.parents) if not path.exists()]

    def find_or_add(
        self, key: str, sha256: str, encode: Callable[[Path], EncodedText]
    ) -> EncodedText:
        """Return the encoding of a text; one process makes it, the others wait for it.

        Args:
            key: of the text and of how it is encoded.
            sha256: of the text.
            encode: creates the directory of the encoding.

        Raises:
            DataError: the cache cannot be written.
        """
        directory = self.root / f"{key[:16]}-{FORMAT}"
        if known := self._read(directory, sha256):
            return known
        with self.locked():
            if known := self._read(directory, sha256):
                return known
            begin = time.monotonic()
            encoded = encode(directory)
            if time.monotonic() - begin < KEPT_SECONDS:
                self._added.append(directory)
            return encoded

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the cache.

        Raises:
            DataError: the cache cannot be written.
        """
        try:
            with open_lock(self.root, self._wait_for):
                for leftover in self.root.glob(".partial-*"):  # of killed processes
                    shutil.rmtree(leftover, ignore_errors=True)
                yield
        except OSError as error:
            raise DataError(
                f"cannot write the encoded text to data.cache_dir={self.root}: {error}; choose "
                "another"
            ) from error

    def _wait_for(self, lock: Any) -> None:
        waits = f"waiting for another process, which encodes a text in data.cache_dir={self.root}"
        try:
            with log_if_long(waits):
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"data.cache_dir={self.root} is on a file system without locks "
                f"({reason(error)}); choose a local directory"
            ) from error

    def _read(self, directory: Path, sha256: str) -> EncodedText | None:
        """Return the cached encoding if it is complete and undamaged."""
        tokens = directory / "tokens.bin"
        try:
            content = json.loads(read_regular(directory / "meta.json", MAX_META_BYTES))
            meta, digest = content.values()
            encoded = build(EncodedText, {"directory": str(directory), **meta}, "")
            size = encoded.length * np.dtype(encoded.dtype).itemsize
            whole = (
                tokens.stat().st_size == size
                and encoded.sha256 == sha256
                and digest_of(meta) == digest
                and self._hash_tokens(tokens, directory) == encoded.tokens_sha256
            )
            tokenizer_from_state(encoded.tokenizer)
        except (OSError, *INVALID):
            return None
        return encoded if whole else None

    def _hash_tokens(self, tokens: Path, directory: Path, again: bool = False) -> str:
        key = ["tokens", directory.name]
        status = file_status([tokens])
        known = None if again else self.records.find(key, status, Hash)
        if known is None:
            known = Hash(_sha256_of_file(tokens))
            self.records.add(key, status, file_status([tokens]), known)
        return known.sha256

    def hash_new(self, tokens: Path, directory: Path) -> str:
        """Return the SHA-256 of tokens that have just been written, to be moved to a directory."""
        if tokens.stat().st_size >= LONG_BYTES:
            settle(tokens)
        return self._hash_tokens(tokens, directory, again=True)

    def hash(self, text: Text, again: bool = False) -> str:
        """Return the SHA-256 of a text, which need not be read if an earlier start has read it.

        Args:
            again: read it in any case.
        """
        status = text.status()
        reading = None if again else self.records.find(text.key(), status, Reading)
        if reading is None:
            reading = Reading(sha256_of(text), text.contents.counts)
            self.records.add(text.key(), status, text.status(), reading)
        text.contents.counts = reading.counts
        return reading.sha256

    def hashed(self, config: DataConfig, texts: list[Text]) -> list[Text]:
        """Return texts with their SHA-256.

        Raises:
            DataError: that of all differs from `data.sha256`.
        """
        known = [replace(text, sha256=self.hash(text)) for text in texts]
        sha256 = sha256_of_all(known)
        if config.sha256 not in (None, sha256):
            raise DataError(
                f"{config.source} has SHA-256 {sha256}, not data.sha256={config.sha256}; "
                "set data.sha256=null to use it anyway"
            )
        return known

    def check_unchanged(self, text: Text) -> None:
        """Refuse a text whose SHA-256 is another one now than when it was opened."""
        if self.hash(text, again=True) != text.sha256:
            self.records.forget()  # the text may have been another one than was recorded
            raise DataError(f"{text.source} changed while being read; run again")

    def keep_records(self) -> None:
        """Write what has been found by reading, unless another process holds the lock."""
        if self.records.new:
            with contextlib.suppress(OSError), open_lock(self.root, lock_now):
                self.records.write()

    def note_copy(self, url: str, path: Path) -> None:
        """Note a file that is copied out of a local archive, as zip://a.txt::b.zip."""
        _, chained, last = url.rpartition("::")
        is_local = chained and "://" not in last.removeprefix("file://")
        if is_local and not path.exists():
            self._added.append(path)

    def discard(self) -> None:
        """Delete what this object has added, also the cache itself if it is new and empty."""
        if not self.root.exists() or not (self._added or self._missing):
            return
        with contextlib.suppress(OSError, DataError), open_lock(self.root, self._wait_for):
            for path in self._added:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            if self._missing:
                # It is not there, or holds what took a while to download.
                with contextlib.suppress(OSError):
                    (self.root / DOWNLOADS).rmdir()
                if {*os.listdir(self.root)} <= {LOCK, RECORDS}:
                    self.records.forget()
                    (self.root / LOCK).unlink()
                    for path in self._missing:
                        path.rmdir()


def _sha256_of_file(path: Path) -> str:
    [sha256] = hashes_of(bytes_of([path]))
    return sha256
