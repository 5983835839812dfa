"""Text to memory-mapped integers: read from any fsspec URL, encoded once per machine, cached by content.

The text is read in two passes of bounded memory: the first checks the bytes, counts the characters and collects the
distinct ones, the second writes one small integer per character. A cache directory holds `tokens.bin` and `meta.json`
and appears whole or not at all.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from mingpt_ddp.config.schema import DataConfig
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.reader import TextIteratorIO
from mingpt_ddp.errors import ConfigError, DataError
from mingpt_ddp.storage.storage import atomic_write, sync_directory

BUILTIN = "builtin:python_docs"
CHUNK_BYTES = 1 << 18
FORMAT = 2
CODE_POINTS = 0x110000


@dataclass(frozen=True)
class EncodedText:
    """An encoded text on disk, as plain values that can travel between ranks."""

    directory: str
    sha256: str  # of the file's bytes, before decompression
    length: int  # characters
    vocabulary: str  # the distinct characters in code-point order; a token is an index into it
    dtype: str  # of one token on disk
    tokens_sha256: str  # of tokens.bin


class TextDataset:
    """The encoded text, split into a training and a validation part; neither looks into the other."""

    def __init__(self, encoded: EncodedText, config: DataConfig) -> None:
        """
        Raises:
            DataError: a part is too short for one window, or for one prediction in the validation part.
        """
        self.vocabulary = encoded.vocabulary
        self.vocab_size = len(encoded.vocabulary)
        tokens: Any = np.memmap(Path(encoded.directory) / "tokens.bin", dtype=encoded.dtype, mode="r")
        tokens = tokens[: int(len(tokens) * config.truncate)]
        boundary = int(len(tokens) * config.train_split)
        self.train, self.val = tokens[:boundary], tokens[boundary:]
        if len(self.train) < config.block_size + 1:
            raise DataError(
                f"the training text has {len(self.train)} characters, one window needs data.block_size + 1 = "
                f"{config.block_size + 1}; use a longer text or a smaller data.block_size"
            )
        if len(self.val) < 2:
            raise DataError(f"the validation text has {len(self.val)} characters, too few; lower data.train_split")


class CharTokenizer:
    """Characters to tokens and back."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.index = {character: i for i, character in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            DataError: naming the characters that the training text does not have.
        """
        unknown = sorted(set(text) - self.index.keys())
        if unknown:
            names = ", ".join(repr(c) for c in unknown[:10])
            raise DataError(f"the model does not know {names}: these characters are not in its training text")
        return [self.index[c] for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[t] for t in tokens)


def prepare(config: DataConfig) -> EncodedText:
    """Fetch and encode the text, or find it in the cache.

    Raises:
        DataError: it cannot be read, is not what `data.sha256` says, or is not a text to learn from.
    """
    cache = Path(config.cache_dir)
    open_text = _opener(config, cache)
    sha256 = _digest(open_text, config)
    directory = cache / f"{sha256[:16]}-{FORMAT}"
    found = _find(directory, sha256)
    if found is not None:
        return found
    try:
        with _exclusive_lock(cache):
            return _find(directory, sha256) or _encode(open_text, directory, sha256, config.path)
    except OSError as error:
        raise DataError(f"cannot write the encoded text to data.cache_dir={cache}: {error}") from error


def _opener(config: DataConfig, cache: Path) -> Callable[[], io.BufferedReader]:
    """How to open the file's bytes, as often as needed; remote files are fetched into the cache first."""
    if config.reader is not None:
        return lambda: io.BufferedReader(TextIteratorIO(config), CHUNK_BYTES)
    if config.path == BUILTIN:
        content = python_docs().encode()
        return lambda: io.BufferedReader(io.BytesIO(content))
    path = config.path
    try:
        proxies = {"client_kwargs": {"trust_env": True}} if path.startswith(("http://", "https://")) else {}
        fs, name = fsspec.core.url_to_fs(path, **proxies)
        if "file" not in fs.protocol and "local" not in fs.protocol:
            name = str(_fetch(fs, name, cache / "downloads" / hashlib.sha256(path.encode()).hexdigest()[:16], config))
        if Path(name).exists() and not Path(name).is_file():
            raise DataError(f"data.path={path} is not a regular file")
        _open(Path(name)).close()
    except FileNotFoundError as error:
        raise DataError(f"data.path={path}: there is no such file") from error
    except DataError:
        raise
    except Exception as error:  # every protocol fails in its own way
        reason = str(error) or type(error).__name__
        raise DataError(
            f"cannot read data.path={path} ({reason[:200]}); without a network, set data.path to a local copy"
        ) from error
    return partial(_open, Path(name))


def _open(path: Path) -> io.BufferedReader:
    return open(path, "rb")


def _fetch(fs: Any, name: str, target: Path, config: DataConfig) -> Path:
    """The local copy of a remote file; one with the expected SHA-256 is not fetched again."""
    if target.exists() and config.sha256 and _sha256(partial(_open, target)) == config.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    download = Path(tempfile.mkdtemp(dir=target.parent)) / "download"
    try:
        fs.get_file(name, str(download))
        if config.sha256 and _sha256(partial(_open, download)) != config.sha256:
            raise DataError(
                f"data.path={config.path} does not have data.sha256={config.sha256}; is it another version?"
            )
        os.replace(download, target)
    finally:
        shutil.rmtree(download.parent, ignore_errors=True)
    return target


def python_docs() -> str:
    """The language reference that CPython's help() shows: 460,000 to 510,000 characters, by Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _sha256(open_bytes: Callable[[], io.BufferedReader]) -> str:
    digest = hashlib.sha256()
    with open_bytes() as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(open_text: Callable[[], io.BufferedReader], config: DataConfig) -> str:
    try:
        sha256 = _sha256(open_text)
    except OSError as error:
        raise DataError(f"cannot read data.path={config.path}: {error}") from error
    if config.sha256 is not None and sha256 != config.sha256:
        raise DataError(
            f"data.path={config.path} has SHA-256 {sha256}, not data.sha256={config.sha256}; "
            "set data.sha256=null to use it all the same"
        )
    return sha256


def _find(directory: Path, sha256: str) -> EncodedText | None:
    """The cached encoding, if it is whole."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        encoded = build(EncodedText, {"directory": str(directory), **meta}, "")
        size = (directory / "tokens.bin").stat().st_size
        whole = encoded.sha256 == sha256 and encoded.dtype == _dtype(len(encoded.vocabulary))
        whole = whole and size == encoded.length * np.dtype(encoded.dtype).itemsize
        whole = whole and _sha256(partial(_open, directory / "tokens.bin")) == encoded.tokens_sha256
    except (OSError, ValueError, TypeError, RecursionError, ConfigError):
        return None
    return encoded if whole else None


def _dtype(distinct: int) -> str:
    """The smallest integer that counts so many characters."""
    return "uint8" if distinct <= 1 << 8 else "uint16" if distinct <= 1 << 16 else "uint32"


def _characters(open_text: Callable[[], io.BufferedReader], path: str) -> Iterator[np.ndarray[Any, Any]]:
    """The text as arrays of code points, a few MiB at a time.

    Raises:
        DataError: bytes that are not UTF-8, with their position, or a broken gzip file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, at_start = 0, True
    with open_text() as raw:
        zipped = raw.peek(2)[:2] == b"\x1f\x8b"  # which no UTF-8 begins with
        stream: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
        while True:
            try:
                chunk = stream.read(CHUNK_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"data.path={path} is not a whole gzip file: {error}") from error
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = position - pending + error.start
                raise DataError(f"data.path={path} is not UTF-8 at byte {at}; convert it with iconv") from error
            position += len(chunk)
            if at_start and text:
                text, at_start = text.removeprefix("\ufeff"), False  # a byte order mark is no character of the text
            yield np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
            if not chunk:
                return


def _encode(open_text: Callable[[], io.BufferedReader], directory: Path, sha256: str, path: str) -> EncodedText:
    seen = np.zeros(CODE_POINTS, dtype=bool)
    length = 0
    for codes in _characters(open_text, path):
        seen[codes] = True
        length += len(codes)
    distinct = np.flatnonzero(seen)
    if length == 0:
        raise DataError(f"data.path={path} is empty")
    if len(distinct) < 2:
        raise DataError(f"data.path={path} has one distinct character; there is nothing to learn")
    dtype = _dtype(len(distinct))
    token = np.zeros(CODE_POINTS, dtype=dtype)
    token[distinct] = np.arange(len(distinct), dtype=dtype)
    vocabulary = "".join(map(chr, distinct))

    building = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory.parent))
    try:
        with open(building / "tokens.bin", "wb") as file:
            for codes in _characters(open_text, path):
                file.write(token[codes].tobytes())
            file.flush()
            os.fsync(file.fileno())
        if _sha256(open_text) != sha256:
            raise DataError(f"data.path={path} changed while it was read; run again")
        tokens_sha256 = _sha256(partial(_open, building / "tokens.bin"))
        encoded = EncodedText(str(directory), sha256, length, vocabulary, dtype, tokens_sha256)
        meta = {key: value for key, value in asdict(encoded).items() if key != "directory"}
        atomic_write(building / "meta.json", json.dumps(meta).encode())
        shutil.rmtree(directory, ignore_errors=True)  # it may be there, damaged
        os.replace(building, directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return encoded


@contextlib.contextmanager
def _exclusive_lock(cache: Path) -> Iterator[None]:
    """One process at a time encodes; the others find its work."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in cache.glob(".partial-*"):  # of processes that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        yield
