"""An opened text: its bytes to hash and its characters to encode, in pieces that fit in memory."""

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mingpt_ddp.config.builders import reader_of
from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.data.file_kinds import BINARY, HEAD_BYTES, NOT_UTF8, kind_of
from mingpt_ddp.data.known_files import digest_of, file_status
from mingpt_ddp.data.text.contents import Contents, refusal
from mingpt_ddp.data.tokenizers.tokenizer_base import END
from mingpt_ddp.data.tokens.token_files import TokenFile
from mingpt_ddp.errors import DataError

CHUNK_BYTES = HEAD_BYTES  # so that the first chunk of a text is a head for kind_of
READING = 2  # raise it if the same files are read as another text
READING_KEYS = ("path", "format", "end_token", "max_expansion", "dtype")  # of data, which say how


@dataclass(frozen=True)
class Text:
    """A text, or files of tokens, that can be read again.

    Attributes:
        config: its path is this text.
        contents: what the text consists of, known once it has been read.
        hashed: iterates over what its SHA-256 is of, in pieces; an empty one ends each file.
        read: iterates over its characters, in pieces; with `data.end_token` END ends each document.
        files: the local files that it reads, known before any is read; None: unknown.
        tokens: files of them, instead of characters.
        split: which split is all of it; "": it is divided.
        sha256: "" until it has been hashed.
    """

    config: DataConfig
    contents: Contents
    hashed: Callable[[], Iterator[bytes]]
    read: Callable[[], Iterator[str]]
    files: list[Path] | None = None
    tokens: list[TokenFile] = field(default_factory=list)
    split: str = ""
    sha256: str = ""

    @property
    def form(self) -> Form:
        """How it is read, as `data.format`; never auto."""
        return self.contents.form

    @property
    def source(self) -> str:
        """What messages call it."""
        return self.contents.source

    def key(self) -> list[Any]:
        """Return what says which files are read and how, as JSON values."""
        paths = [os.path.abspath(path) for path in self.files or ()]
        return [reading_keys(self.config), self.form, self.contents.part, paths]

    def status(self) -> list[Any] | None:
        """Return what a write to the files changes; None: they are to be read in any case."""
        if self.files is None or self.config.sha256:
            return None
        return file_status(self.files)


def reading_keys(config: DataConfig) -> list[Any]:
    """Return what says how the files of a text are read, as JSON values."""
    if config.reader is None:
        return [READING, [getattr(config, key) for key in READING_KEYS]]
    entry = reader_of(config.reader)
    return [READING, vars(config), entry and entry[1]]


def text_of_bytes(
    config: DataConfig,
    contents: Contents,
    pieces: Callable[[], Iterator[bytes]],
    files: list[Path] | None,
) -> Text:
    """Return a text of UTF-8.

    Args:
        pieces: iterates over its bytes; an empty one ends each document.
    """
    read = partial(decoded, pieces, contents.source, config.end_token)
    return Text(config, contents, pieces, read, files)


def bytes_of(paths: list[Path]) -> Iterator[bytes]:
    """Yield the bytes of files in pieces, and an empty one at the end of each."""
    for path in paths:
        with open(path, "rb") as file:
            yield from pieces_in(file)


def pieces_in(file: Any) -> Iterator[bytes]:
    """Yield the bytes of an open file in pieces, and an empty one at its end."""
    while piece := file.read(CHUNK_BYTES):
        yield piece
    yield b""


def hashes_of(pieces: Iterator[bytes]) -> list[str]:
    """Return the SHA-256 of each file, or document, that an empty piece ends."""
    hashes = []
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        if not piece:
            hashes.append(digest.hexdigest())
            digest = hashlib.sha256()
    return hashes


def sha256_of(text: Text) -> str:
    """Return the SHA-256 of a text's bytes; of several files or documents, the digest of theirs."""
    return _combined(hashes_of(text.hashed()))


def sha256_of_all(texts: list[Text]) -> str:
    """Return the SHA-256 of texts together, and of the splits that they are."""
    return _combined([{text.split: text.sha256} if text.split else text.sha256 for text in texts])


def _combined(hashes: list[Any]) -> str:
    return str(hashes[0]) if len(hashes) == 1 else digest_of(hashes)


def decoded(pieces: Callable[[], Iterator[bytes]], source: str, has_end: bool) -> Iterator[str]:
    """Yield documents of UTF-8 without a byte order mark.

    Args:
        pieces: iterates over their bytes; an empty one ends each document.
        has_end: END follows each of them.

    Raises:
        DataError: invalid UTF-8, with the position of the byte.
    """
    return _gathered(_decoded(pieces(), source, has_end))


def documents(records: Callable[[], Iterator[str]], has_end: bool) -> Iterator[str]:
    """Yield records as documents, each with END or a line feed after it."""
    return _gathered(_ended(records(), has_end))


def _decoded(pieces: Iterator[bytes], source: str, has_end: bool) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    at_start = True
    for piece in pieces:
        position += len(piece)
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            kind = kind_of(piece) if at_start else None
            if kind not in (None, NOT_UTF8, BINARY):
                raise refusal(source, kind) from error
            # what the decoder was given ends where the piece ends
            at = position - len(error.object) + error.start
            raise DataError(f"{source} is not UTF-8 at byte {at}; {NOT_UTF8.advice}") from error
        if at_start and text:
            text = text.removeprefix("\ufeff")
            at_start = False
        yield text
        if has_end and not piece:
            yield END


def _ended(records: Iterator[str], has_end: bool) -> Iterator[str]:
    for record in records:
        yield record
        if has_end:
            yield END
        elif not record.endswith("\n"):
            yield "\n"


def _gathered(pieces: Iterator[str]) -> Iterator[str]:
    """Join short pieces, so that what follows costs little for each of them."""
    gathered: list[str] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            yield "".join(gathered)
            gathered = []
            size = 0
    yield "".join(gathered)
