"""Download, decode and encode a text once per machine, into a content-addressed cache that is memory-mapped.

Two passes read the text in bounded memory: the first collects the distinct characters, the second writes one small
integer per character. A cache directory holds `tokens.bin` and `meta.json` and is created atomically.
"""

import codecs
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.config.registry import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.config.validation import build
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.download import download, download_path, open_filesystem, user_cache
from mingpt_ddp.data.tokenizer import CharTokenizer
from mingpt_ddp.errors import DataError, UserError
from mingpt_ddp.storage.storage import atomic_write, sync_directory

BUILTIN = "builtin:python_docs"
CHUNK_BYTES = 1 << 18
FORMAT = 4
CODE_POINTS = 0x110000
OpenBytes = Callable[[], io.BufferedReader]


def prepare(config: DataConfig) -> EncodedText:
    """Find the text in the cache, or fetch and encode it.

    Raises:
        DataError: the text cannot be read, has another SHA-256 than `data.sha256`, or has no two distinct characters.
    """
    cache = Path(config.cache_dir) if config.cache_dir is not None else user_cache()
    try:
        open_text = _source(config, cache)
        sha256 = _checked_sha256(open_text, config)
    except FileNotFoundError as error:
        raise DataError(f"data.path={config.path}: there is no such file") from error
    except UserError:
        raise
    except Exception as error:  # exceptions differ by protocol
        reason = str(error) or type(error).__name__
        raise DataError(
            f"cannot read data.path={config.path} ({reason[:200]}); without a network, set data.path to a local copy"
        ) from error
    if cached := _read_cache(directory := cache / f"{sha256[:16]}-{FORMAT}", sha256):
        return cached
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: a symbolic link could lead to any file.
        with open(os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process encodes, the others wait for its result
            for leftover in cache.glob(".partial-*"):  # of killed processes
                shutil.rmtree(leftover, ignore_errors=True)
            return _read_cache(directory, sha256) or _encode(open_text, directory, sha256, config.path)
    except OSError as error:
        raise DataError(f"cannot write the encoded text to data.cache_dir={cache}: {error}; choose another") from error


def _source(config: DataConfig, cache: Path) -> OpenBytes:
    """Return a function that opens the text's bytes; download a remote file into the cache first."""
    if config.reader is not None:
        return lambda: io.BufferedReader(TextIteratorIO(config), CHUNK_BYTES)
    if config.path == BUILTIN:
        content = python_docs().encode()
        return lambda: io.BufferedReader(io.BytesIO(content))
    fs, name, is_local = open_filesystem(config.path)
    target = download_path(config.path, cache)
    if not is_local and not (target.exists() and config.sha256 and _sha256(_opener(target)) == config.sha256):
        download(fs, name, target, lambda path: _checked_sha256(_opener(path), config))
    name = name if is_local else str(target)
    if os.path.exists(name) and not os.path.isfile(name):
        raise DataError(f"data.path={config.path} is not a regular file")
    return _opener(name)


def _opener(path: str | Path) -> OpenBytes:
    return lambda: open(path, "rb")


def python_docs() -> str:
    """Return the language reference that CPython's help() shows: 460,000 to 510,000 characters, by Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class TextIteratorIO(io.RawIOBase):
    """The text that a user's reader yields, as a UTF-8 stream that is never whole in memory."""

    def __init__(self, config: DataConfig) -> None:
        self._pieces, self._rest = _read_pieces(config), memoryview(b"")  # the rest of the last piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """
        Raises:
            CodeError: the reader raised an exception; names its line.
            DataError: the reader yields something other than text, or cannot read its source.
        """
        while not self._rest and (piece := next(self._pieces, None)) is not None:
            self._rest = memoryview(piece)
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _read_pieces(config: DataConfig) -> Iterator[bytes]:
    """Yield the reader's pieces as UTF-8."""
    name = f"data.reader={config.reader}"
    with attribute_errors_to_user_code():
        try:
            for piece in BUILDERS["data"][str(config.reader)](config):
                try:
                    yield piece.encode()
                except (AttributeError, UnicodeEncodeError) as error:
                    raise DataError(f"{name} must yield text: {error}") from error
        except OSError as error:
            raise DataError(f"{name} cannot read data.path={config.path}: {error}") from error


def _sha256(open_bytes: OpenBytes) -> str:
    digest = hashlib.sha256()
    with open_bytes() as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _checked_sha256(open_bytes: OpenBytes, config: DataConfig) -> str:
    """Return the SHA-256 of a text; raise DataError if it differs from `data.sha256`."""
    sha256 = _sha256(open_bytes)
    if config.sha256 not in (None, sha256):
        raise DataError(
            f"data.path={config.path} has SHA-256 {sha256}, not data.sha256={config.sha256}; "
            "set data.sha256=null to use it anyway"
        )
    return sha256


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def _read_cache(directory: Path, sha256: str) -> EncodedText | None:
    """Return the cached encoding if it is complete and undamaged."""
    try:
        meta, digest = json.loads((directory / "meta.json").read_text()).values()
        encoded = build(EncodedText, {"directory": str(directory), **meta}, "")
        whole = (directory / "tokens.bin").stat().st_size == encoded.length * np.dtype(encoded.dtype).itemsize
        whole = whole and (sha256, digest) == (encoded.sha256, _digest(meta))
        whole = whole and _sha256(_opener(directory / "tokens.bin")) == encoded.tokens_sha256
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, UserError):
        return None
    return encoded if whole else None


def _decode(open_text: OpenBytes, path: str) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the text, decompressed and without a byte order mark, as arrays of code points, a few MiB at a time.

    Raises:
        DataError: invalid UTF-8, with the position of the byte, or a damaged gzip file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, at_start = 0, True
    with open_text() as raw:
        zipped = raw.peek(2)[:2] == b"\x1f\x8b"  # which is invalid UTF-8
        stream: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
        while True:
            try:
                chunk = stream.read(CHUNK_BYTES)
                position += len(chunk)
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = position - len(error.object) + error.start  # the chunk ends at the end of the decoder's input
                raise DataError(f"data.path={path} is not UTF-8 at byte {at}; convert it with iconv") from error
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"data.path={path} is not a whole gzip file: {error}") from error
            if at_start and text:
                text, at_start = text.removeprefix("\ufeff"), False
            yield np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
            if not chunk:
                return


def _encode(open_text: OpenBytes, directory: Path, sha256: str, path: str) -> EncodedText:
    """Write the tokens and their description to `directory`, atomically."""
    seen, length = np.zeros(CODE_POINTS, dtype=bool), 0
    for codes in _decode(open_text, path):
        seen[codes] = True
        length += len(codes)
    distinct = np.flatnonzero(seen)
    if length == 0:
        raise DataError(f"data.path={path} is empty")
    if len(distinct) < 2:
        raise DataError(f"data.path={path} has one distinct character; there is nothing to learn")
    dtype = str(np.min_scalar_type(len(distinct) - 1))  # the smallest unsigned type that holds every token
    token_of = np.zeros(CODE_POINTS, dtype=dtype)
    token_of[distinct] = np.arange(len(distinct), dtype=dtype)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory.parent, ignore_cleanup_errors=True) as name:
        tokens = Path(name) / "tokens.bin"
        with open(tokens, "wb") as file:
            for codes in _decode(open_text, path):
                file.write(token_of[codes].tobytes())
            file.flush()
            os.fsync(file.fileno())
        if _sha256(open_text) != sha256:
            raise DataError(f"data.path={path} changed while being read; run again")
        tokenizer = CharTokenizer("".join(map(chr, distinct))).state()
        encoded = EncodedText(str(directory), sha256, length, tokenizer, dtype, _sha256(_opener(tokens)))
        meta = {key: value for key, value in asdict(encoded).items() if key != "directory"}
        content = {"text": meta, "digest": _digest(meta)}
        atomic_write(Path(name) / "meta.json", json.dumps(content).encode())
        shutil.rmtree(directory, ignore_errors=True)  # a damaged one
        os.replace(name, directory)
        sync_directory(directory.parent)
    return encoded
