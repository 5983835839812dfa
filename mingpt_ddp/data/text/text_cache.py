"""The cache of encoded texts on this machine: locked, verified when read, and taken back."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.download import DOWNLOADS, download_path, user_cache
from mingpt_ddp.data.file_records import (
    INVALID,
    RECORDS,
    FileRecords,
    Hash,
    digest_of,
    file_status,
    settle,
)
from mingpt_ddp.data.text.archives import OpenBytes, opener
from mingpt_ddp.data.text.texts import Text
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import DataError, reason
from mingpt_ddp.storage.lock import LOCK, lock_now, log_if_long, open_lock
from mingpt_ddp.storage.storage import read_regular

FORMAT = 4
KEPT_SECONDS = 60.0  # a text that took longer to encode stays, even if its run is refused
MAX_META_BYTES = 1 << 25  # of meta.json, with the tokenizer
CHUNK_BYTES = 1 << 18
LONG_BYTES = 1 << 27  # of tokens that take longer to hash at the next start than to wait for once


class TextCache:
    """Directories of encoded texts, `data.cache_dir`, and which of them this object has added."""

    def __init__(self, config: DataConfig) -> None:
        self.root = Path(config.cache_dir) if config.cache_dir is not None else user_cache()
        self.records = FileRecords(self.root / RECORDS, uses=config.verify == "auto")
        self._added: list[Path] = []
        # deepest first
        self._missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        # files that are copied out of local archives, as zip://a.txt::b.zip; they are no downloads
        urls = [url for url, _ in config.sources or []]
        urls += [*(config.val_paths or {}).values(), *(config.split_paths or {}).values()]
        if config.path is not None:
            urls.append(config.path)
        copies = [download_path(url, self.root) for url in urls if _is_in_local_archive(url)]
        self._copies = [path for path in copies if not path.exists()]

    def directory(self, key: str) -> Path:
        return self.root / f"{key[:16]}-{FORMAT}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the cache: one process encodes, the others wait for its result.

        Raises:
            DataError: the cache cannot be written.
        """
        try:
            lock = open_lock(self.root, self._wait_for)
        except OSError as error:
            raise _not_writable(self.root, error) from error
        with lock:
            for leftover in self.root.glob(".partial-*"):  # of killed processes
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                yield
            except OSError as error:
                raise _not_writable(self.root, error) from error

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

    def read(self, directory: Path, sha256: str) -> EncodedText | None:
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
                and self._hash(tokens, directory) == encoded.tokens_sha256
            )
            tokenizer_from_state(encoded.tokenizer)
        except (OSError, *INVALID):
            return None
        return encoded if whole else None

    def _hash(self, tokens: Path, directory: Path, again: bool = False) -> str:
        """Return the SHA-256 of the tokens of a directory."""
        key = ["tokens", directory.name]
        state = partial(file_status, [tokens])
        return self.records.get(key, state, lambda: _hash_of(tokens), Hash, again).sha256

    def hash_new(self, tokens: Path, directory: Path) -> str:
        """Return the SHA-256 of tokens that have just been written, to be moved to a directory."""
        if tokens.stat().st_size >= LONG_BYTES:
            settle(tokens)
        return self._hash(tokens, directory, again=True)

    def keep_records(self) -> None:
        """Write what has been found by reading, unless another process holds the lock."""
        if self.records.new:
            with contextlib.suppress(OSError), open_lock(self.root, lock_now):
                self.records.write()

    @contextlib.contextmanager
    def adding(self, directory: Path) -> Iterator[None]:
        """Note a directory that the body creates, unless creating it again would take long."""
        begin = time.monotonic()
        yield
        if time.monotonic() - begin < KEPT_SECONDS:
            self._added.append(directory)

    def discard(self) -> None:
        """Delete what this object has added, also the cache itself if it is new and empty."""
        if not self.root.exists() or not (self._added or self._missing):
            return
        with contextlib.suppress(OSError, DataError), open_lock(self.root, self._wait_for):
            for directory in self._added:
                shutil.rmtree(directory, ignore_errors=True)
            for path in self._copies:
                path.unlink(missing_ok=True)
            if self._missing:
                # it is not there, or has what took a while to download
                with contextlib.suppress(OSError):
                    (self.root / DOWNLOADS).rmdir()
                if {*os.listdir(self.root)} <= {LOCK, RECORDS}:
                    self.records.forget()
                    (self.root / LOCK).unlink()
                    for path in self._missing:
                        path.rmdir()


def _is_in_local_archive(url: str) -> bool:
    """Return whether a chained URL ends with a local file."""
    _, chained, last = url.rpartition("::")
    return bool(chained) and "://" not in last.removeprefix("file://")


def _not_writable(root: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write the encoded text to data.cache_dir={root}: {error}; choose another"
    )


def _hash_of(path: Path) -> Hash:
    return Hash(file_sha256(opener(path)))


def sha256_of(text: Text) -> str:
    """Return the SHA-256 of a text's bytes; of several files or documents, the digest of theirs."""
    return combined([file_sha256(open_bytes) for open_bytes in text.hashed()])


def sha256_of_splits(digests: list[tuple[str, str]]) -> str:
    """Return the SHA-256 of texts together.

    Args:
        digests: of each its split, "" if it is divided, and its SHA-256.
    """
    return combined([{split: sha256} if split else sha256 for split, sha256 in digests])


def combined(digests: list[Any]) -> str:
    return str(digests[0]) if len(digests) == 1 else digest_of(digests)


def file_sha256(open_bytes: OpenBytes) -> str:
    """Return the SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with open_bytes() as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
