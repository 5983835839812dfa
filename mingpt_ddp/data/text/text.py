"""Read a text: find its files, decide their format, and hash its pieces while they are read."""

import codecs
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mingpt_ddp.config.builders import reader_of
from mingpt_ddp.config.keys.components import DataConfig, TextFormat
from mingpt_ddp.data.digests import digest_of, status_of
from mingpt_ddp.data.file_kinds import (
    BINARY,
    DAMAGES,
    HEAD_BYTES,
    NOT_UTF8,
    TEXT,
    decompressed,
    kind_of,
)
from mingpt_ddp.data.text.files import BUILTIN, check_splits, files_of, is_one_file
from mingpt_ddp.data.text.formats import format_of_file, refuse_holes, select_files, shown
from mingpt_ddp.data.text.parquet import parquet_table
from mingpt_ddp.data.text.records import choose_column, csv_table, json_table
from mingpt_ddp.data.text.sources import HashedFile, python_docs, read_by_user_code
from mingpt_ddp.data.text.text_cache import TextCache, sha256_of_file
from mingpt_ddp.data.tokenizers.tokenizer import CODE_POINTS
from mingpt_ddp.data.tokenizers.tokenizer_base import END, code_points
from mingpt_ddp.data.tokens.token_files import TokenFile, find_tokens
from mingpt_ddp.errors import DataError, counted

CHUNK_BYTES = HEAD_BYTES
DOCUMENT_END = b"\xff"  # separates the documents of a user's reader in their hash
TABLES = {"jsonl": json_table, "csv": csv_table, "parquet": parquet_table}


class TextPiece(NamedTuple):
    """Part of a document, or all of it.

    Attributes:
        file: Index of the file.
        number: Line, row or object of the document in its file. 0 if the file is the document.
    """

    file: int
    number: int
    text: str


class Text:
    """A text, or files of tokens, that can be read several times.

    Attributes:
        source: Name of the text in log and error messages.
        split: The split that the whole text belongs to, or "" if the text itself is split into
            training, validation and test parts.
        files: The files that are read, or None if a user's reader does not say which.
            `decide_format` leaves out files of other formats.
        form: The format, as data.format. It is never auto once `decide_format` has been called.
        sha256: SHA-256 of the text, once `measure` has been called.
        read_sha256: SHA-256 of the text that `pieces` has just read to its end. It differs from
            `sha256` if the text has changed since it was measured.
        length: Number of characters, once `measure` has been called.
        characters: Distinct code points, once `measure` has been called.
        tokens: The tokens of each file, if these are files of tokens. Set by `decide_format`.
    """

    def __init__(self, config: DataConfig, source: str, split: str, cache: TextCache) -> None:
        self.config = config
        self.source = source
        self.split = split
        self.files = files_of(config, source, cache)
        self._top = os.path.commonpath([each.parent for each in self.files]) if self.files else ""
        self._status = None if self.files is None else status_of(self.files)
        self._is_file = config.reader is None and config.path != BUILTIN
        # True for a directory or a glob, even if it has only one file.
        self._is_several = self._is_file and not is_one_file(config)
        self.form: TextFormat = "text"
        self._read_note = self._skipped_note = ""  # lines for the log
        self.sha256 = self.read_sha256 = ""
        self.length = 0
        self.characters = np.zeros(0, np.int64)
        self.tokens: list[TokenFile] = []

    def key(self) -> list[Any]:
        """Return the cache key of this text: its files and the options used to read them."""
        config = self.config
        how: list[Any] = [config.format, config.column, config.end_token, config.dtype]
        if config.reader is not None:
            known = reader_of(config.reader)
            how = [vars(config), known and known[1]]
        return [how, self.split, self._is_several, self._status]

    @property
    def newest_ns(self) -> float:
        """The newest modification or change time of the files, or infinity if it is not known."""
        if self._status is None:
            return float("inf")
        return max((max(times) for _, _, *times, _ in self._status), default=0)

    def names(self) -> list[str]:
        """Return the names of the files. `TextPiece.file` is an index into this list."""
        return [*map(str, self.files)] if self._is_file and self.files else [self.source]

    def notes(self) -> list[str]:
        """Return lines for the log: which files were skipped, and how the text was read."""
        skipped = [f"{self.source}: {self._skipped_note}"] if self._skipped_note else []
        return [*skipped, self._read_note]

    def name(self, path: Path) -> str:
        """Shorten the path of a file for messages."""
        return os.path.relpath(path, self._top)

    def _where(self, path: Path) -> str:
        return f"{self.source}: {self.name(path)}" if self._is_several else self.source

    def decide_format(self, recorded_form: TextFormat | None, checks_splits: bool) -> None:
        """Decide the format, and leave out files of other formats.

        Args:
            recorded_form: The format in the snapshot to resume, or None in a new run. The text is
                read in this format, even if it looks like another format.
            checks_splits: Refuse files that are named for several splits.

        Raises:
            DataError: There is no text, or a file that is not text. The error says what to do.
        """
        if not self._is_file:
            return
        assert self.files is not None
        form = recorded_form or self.config.format
        if form in ("auto", "text"):
            refuse_holes(self.files)
        if self._is_several:
            selection = select_files(
                self.files, form, self.config, self.source, recorded_form is None
            )
            self.form, self.files = selection.form, selection.files
            self._skipped_note = selection.skipped
            if checks_splits:
                check_splits(self.source, str(self.config.path), self.files)
        else:
            self.form = format_of_file(self.files[0], form, self.config, self.source)
        if self.form == "tokens":
            self.tokens = find_tokens([*map(str, self.files)], self.source, self.config.dtype)
        if self.config.column is not None and self.form in ("text", "tokens"):
            raise DataError(
                f"data.column={self.config.column} needs a table, but {self.source} is read as "
                f"{self.form}; leave data.column out, or set data.format"
            )

    def measure(self) -> None:
        """Read the text once: hash it, and count its characters.

        The end of a document counts as one character, so that all tokenizers split a text alike.

        Raises:
            DataError: The text cannot be read, or it is empty.
        """
        if self.form == "tokens":
            assert self.files is not None
            self.sha256 = combined([*map(sha256_of_file, self.files)])
            return self._describe("")
        seen = np.zeros(CODE_POINTS, dtype=bool)
        length = 0
        is_empty = True
        for text in gathered(self.pieces()):
            seen[code_points(text)] = True
            length += len(text)
            is_empty = is_empty and not text.strip(END)
        if is_empty:
            raise DataError(f"{self.source} is empty")
        seen[ord(END)] = False
        self.sha256 = self.read_sha256
        self.length = length
        self.characters = np.flatnonzero(seen)

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the pieces of the text, with END or a line feed after each document that needs one.

        Raises:
            DataError: A file cannot be read. The error names the file and the line, row or byte.
        """
        if self.config.reader is not None and self.config.end_token:
            return self._documents_of_reader()
        return self._texts() if self.form == "text" else self._records()

    def _documents_of_reader(self) -> Iterator[TextPiece]:
        """Yield each string of a user's reader as a document, unless it is empty."""
        digest = hashlib.sha256()
        n_documents = 0
        for document in read_by_user_code(self.config, self.source):
            if document:
                n_documents += 1
                # UTF-8 never contains this byte. So the hash also tells where documents end.
                digest.update(document.encode() + DOCUMENT_END)
                yield TextPiece(0, n_documents, document + END)
        self.read_sha256 = digest.hexdigest()
        self._describe(f", {counted(n_documents, 'document')}")

    def _texts(self) -> Iterator[TextPiece]:
        """Yield the pieces of UTF-8 files, or the strings of a user's reader."""
        hashes = []
        stream = hashlib.sha256()
        files: list[Any] = [*self.files] if self._is_file and self.files else [None]
        ends = self.config.end_token
        for index, path in enumerate(files):
            last = ""
            raw = path and (io.FileIO if self._is_several else HashedFile)(path)
            for text in self._decoded(path, raw, stream):
                yield TextPiece(index, 0, text)
                last = text
            if last and self._is_several and not ends and last[-1] != "\n":
                yield TextPiece(index, 0, "\n")
                stream.update(b"\n")
            if ends and last:
                yield TextPiece(index, 0, END)
            if isinstance(raw, HashedFile):
                hashes.append(raw.finish())
            elif (ends and last) or path is None:
                hashes.append(stream.hexdigest())
                stream = hashlib.sha256()
        self.read_sha256 = combined(hashes or [stream.hexdigest()])
        self._describe("")

    def _decoded(self, path: Path | None, raw: Any, stream: Any) -> Iterator[str]:
        """Yield the characters of a file, without a byte order mark.

        Args:
            path: Path of the file. None for a user's reader and for the built-in text.
            raw: The open file, or None.
            stream: The hash to update with the characters, unless the bytes of the file are hashed.
        """
        where = self.source if path is None else self._where(path)
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        at_start = True
        for chunk in self._chunks(raw, where):
            position += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                kind = kind_of(chunk) if at_start else TEXT
                if kind not in (TEXT, BINARY, NOT_UTF8):
                    raise kind.refusal(where, str(self.config.path), "text") from error
                # error.object holds a few earlier bytes and this chunk, so both end together.
                at = position - len(error.object) + error.start
                raise DataError(f"{where} is not UTF-8 at byte {at}; {NOT_UTF8.advice}") from error
            if not self._is_file:
                stream.update(text.encode())
            if at_start and text:
                text = text.removeprefix("\ufeff")
                at_start = False
            if self._is_several:
                stream.update(text.encode())
            if text:
                yield text

    def _chunks(self, raw: Any, where: str) -> Iterator[bytes]:
        """Yield the bytes of a text, decompressed, and an empty chunk at the end."""
        if raw is None:
            pieces: Iterable[bytes] = [python_docs().encode()]
            if self.config.reader is not None:
                pieces = (text.encode() for text in read_by_user_code(self.config, where))
            yield from filter(None, pieces)
        else:
            try:
                with io.BufferedReader(raw, HEAD_BYTES) as buffered:
                    file = decompressed(buffered)
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            except DAMAGES as error:
                raise DataError(f"{where} is damaged or cut off: {error}; copy it again") from error
        yield b""

    def _records(self) -> Iterator[TextPiece]:
        """Yield the text of each row. Rows whose text is null or empty are skipped."""
        assert self.files is not None
        hashes = []
        column = self.config.column
        n_texts = n_empty = 0
        for index, path in enumerate(self.files):
            where = self._where(path)
            try:
                raw = HashedFile(path)
                if self.form == "parquet":  # these files are not read from beginning to end
                    raw.drain()
                    raw.seek(0)
                with io.BufferedReader(raw, HEAD_BYTES) as buffered:
                    table = TABLES[self.form](decompressed(buffered), where)
                    # Later files of JSON Lines use the same column. Their first rows may lack it.
                    if index == 0 or self.form != "jsonl":
                        column = choose_column(table, column, where)
                    for number, text in table.values(str(column)):
                        if not text:
                            n_empty += 1
                            continue
                        n_texts += 1
                        if self.config.end_token:
                            text += END
                        elif not text.endswith("\n"):
                            text += "\n"
                        yield TextPiece(index, number, text)
                    hashes.append(raw.finish())
            except DAMAGES as error:
                raise DataError(f"{where} is damaged or cut off: {error}; copy it again") from error
        self.read_sha256 = combined(hashes)
        skipped = f"; skipped {counted(n_empty, 'row')} without text" if n_empty else ""
        self._describe(f", {counted(n_texts, 'text')} of data.column={column}{skipped}")

    def _describe(self, rows: str) -> None:
        """Compose the line for the log that says how the text was read.

        Args:
            rows: The end of the line, which counts the documents or rows.
        """
        line = f"{self.source}: read with data.format={self.form}"
        if self.config.reader is not None:
            line = f"{self.source}: read with data.reader={self.config.reader}"
        if self._is_several and self.files:
            size = sum(path.stat().st_size for path in self.files)
            files = f"{counted(len(self.files), 'file')} of {counted(size, 'byte')}"
            line = f"{line}, {files} {shown(self.files, self.files)}"
        self._read_note = f"{line}{rows}"


def combined(hashes: list[Any]) -> str:
    """Combine the SHA-256 of several files or documents. A single hash is returned as it is."""
    return str(hashes[0]) if len(hashes) == 1 else digest_of(hashes)


def sha256_of_all(texts: list[Text]) -> str:
    """Combine the SHA-256 of several texts and the splits that they belong to."""
    return combined([{text.split: text.sha256} if text.split else text.sha256 for text in texts])


def gathered(pieces: Iterator[TextPiece]) -> Iterator[str]:
    """Join short pieces into longer strings, which take less overhead to process."""
    texts: list[str] = []
    size = 0
    for piece in pieces:
        texts.append(piece.text)
        size += len(piece.text)
        if size >= CHUNK_BYTES:
            yield "".join(texts)
            texts = []
            size = 0
    yield "".join(texts)
