"""Cache encoded texts on this machine.

Each text has a directory. Its name is a digest of everything that decides the tokens: the paths,
sizes, times and inodes of the files, the settings to read them, the tokenizer and the splits. A
start that finds the directory does not read the text. A directory is built under a private name and
renamed once it is complete.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.digests import digest_of, status_of
from mingpt_ddp.data.download import DOWNLOADS, user_cache
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import DataError, UserError
from mingpt_ddp.storage.lock import LOCK, log_if_long, open_lock
from mingpt_ddp.storage.storage import atomic_write, read_regular, sync_directory

CACHE_FORMAT = 6  # raise this number when the content of the cache's files changes
TOKENS, META = "tokens.bin", "meta.json"
# A text that took longer than this to encode or download stays, even if its run is refused.
KEPT_SECONDS = 60.0
# An unfinished directory of this age is deleted: its process has been killed.
LEFTOVER_SECONDS = 86_400.0
MAX_META_BYTES = 1 << 28  # largest size of meta.json, which holds the tokenizer and the file names
CHUNK_BYTES = 1 << 20
# Exceptions that untrusted JSON may raise if it has an unexpected structure.
INVALID = (ValueError, TypeError, LookupError, AttributeError, RecursionError, UserError)


@dataclass(frozen=True)
class CachedText:
    """The description of an encoded text, as meta.json in its directory records it.

    Attributes:
        text: The encoded text. meta.json leaves out its directory.
        is_settled: True if the files were at least two seconds old when they were last read. Any
            later write then changes their times.
        files: Names of the text's files. The rows of sources.bin refer to their indices.
        tokens_status: Size, times and inode of tokens.bin when it was written.
    """

    text: EncodedText
    is_settled: bool
    files: list[str]
    tokens_status: list[int] = field(default_factory=list)


class TextCache:
    """The cache of encoded texts in `data.cache_dir`.

    It keeps track of the directories and downloads that this object has added, so that `discard`
    can delete them.
    """

    def __init__(self, config: DataConfig) -> None:
        self.root = Path(config.cache_dir) if config.cache_dir is not None else user_cache()
        self.reads_all = config.verify == "always"
        self._added: list[Path] = []
        # Directories that a first use will create, from the deepest up.
        self._missing = [path for path in (self.root, *self.root.parents) if not path.exists()]

    def directory(self, key: Any) -> Path:
        """Return the directory for a text with this key, whether it exists or not."""
        return self.root / digest_of([CACHE_FORMAT, key])[:32]

    def find(self, directory: Path) -> CachedText | None:
        """Read the description of a directory. Return None unless it is complete and undamaged."""
        try:
            content = json.loads(read_regular(directory / META, MAX_META_BYTES))
            values, digest = content["entry"], content["digest"]
            text = {"directory": str(directory), **values["text"]}
            entry = build(CachedText, {**values, "text": text}, "")
            tokenizer_from_state(entry.text.tokenizer)
            is_whole = digest_of(values) == digest and self._has_tokens(entry, directory / TOKENS)
        except (OSError, *INVALID):
            return None
        return entry if is_whole else None

    def _has_tokens(self, entry: CachedText, tokens: Path) -> bool:
        """Return False if tokens.bin is damaged. If its times have changed, read it to find out."""
        text = entry.text
        if not text.tokens_sha256:  # the tokens are in the user's token files
            return True
        [status] = status_of([tokens])
        if status[1] != text.length * np.dtype(text.dtype).itemsize:
            return False
        is_same = status[1:] == entry.tokens_status and not self.reads_all
        return is_same or sha256_of_file(tokens) == text.tokens_sha256

    @contextlib.contextmanager
    def adding(self, directory: Path, sha256: str) -> Iterator[Path]:
        """Yield a private directory for the caller to fill, then rename it to its final name.

        Args:
            directory: The final path.
            sha256: SHA-256 of the text. If another node has added the same text in the meantime,
                the other node's directory stays.
        """
        begin = time.monotonic()
        self._remove_leftovers()
        with tempfile.TemporaryDirectory(
            prefix=".partial-", dir=self.root, ignore_cleanup_errors=True
        ) as name:
            yield Path(name)
            known = self.find(directory)
            if known is None or known.text.sha256 != sha256:
                # The directory may exist already, damaged or with another text.
                shutil.rmtree(directory, ignore_errors=True)
                try:
                    os.replace(name, directory)
                except OSError:
                    # The rename also fails if another node has just added the directory.
                    if self.find(directory) is None:
                        raise
        sync_directory(self.root)
        if time.monotonic() - begin < KEPT_SECONDS:
            self._added.append(directory)

    def write(self, entry: CachedText, directory: Path) -> None:
        """Write meta.json, which completes a directory."""
        values = asdict(entry)
        del values["text"]["directory"]
        if (directory / TOKENS).exists():
            values["tokens_status"] = status_of([directory / TOKENS])[0][1:]
        content = {"entry": values, "digest": digest_of(values)}
        atomic_write(directory / META, json.dumps(content).encode())

    def settle(self, entry: CachedText) -> None:
        """Record that the files were at least two seconds old when they were read again."""
        with contextlib.suppress(OSError):
            self.write(replace(entry, is_settled=True), Path(entry.text.directory))

    def downloaded(self, download: Callable[[], tuple[list[Path], bool]]) -> list[Path]:
        """Download files into the cache, and remember new ones for `discard`.

        Args:
            download: Downloads the files. Returns them, and True if any of them is new.
        """
        begin = time.monotonic()
        files, is_new = download()
        if is_new and time.monotonic() - begin < KEPT_SECONDS:
            self._added += files
        return files

    def forget(self, files: list[Path]) -> None:
        """Delete those files that are downloads in this cache."""
        for path in files:
            if path.is_relative_to(self.root / DOWNLOADS):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cache's lock, so that one process of this machine encodes and others wait.

        Nothing is locked if the file system has no locks.

        Raises:
            DataError: The cache cannot be written.
        """
        try:
            with open_lock(self.root, self._wait_for):
                yield
        except OSError as error:
            raise DataError(
                f"cannot write the encoded text to data.cache_dir={self.root}: {error}; choose "
                "another directory"
            ) from error

    def _wait_for(self, lock: Any) -> None:
        waits = f"waiting for another process that encodes a text in data.cache_dir={self.root}"
        with log_if_long(waits), contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)

    def _remove_leftovers(self) -> None:
        """Delete unfinished directories of processes that have been killed."""
        for leftover in self.root.glob(".partial-*"):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)

    def discard(self) -> None:
        """Delete the directories and downloads that this object has added.

        If the cache itself is new and then empty, it is deleted too.
        """
        if not self.root.exists() or not (self._added or self._missing):
            return
        with contextlib.suppress(OSError, DataError), open_lock(self.root, self._wait_for):
            for path in self._added:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        os.removedirs(path.parent)  # deletes only directories that are empty
            if self._missing and {*os.listdir(self.root)} <= {LOCK}:
                (self.root / LOCK).unlink()
                for path in self._missing:
                    path.rmdir()


def sha256_of_file(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
