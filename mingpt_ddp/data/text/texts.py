"""Texts as streams of bytes: a file, a directory, a glob, an archive, a URL, or a user's reader."""

import glob
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.config.registry import BUILDERS, attribute_errors_to_user_code, reader_of
from mingpt_ddp.data.content import (
    HEAD_BYTES,
    kind_of_names,
)
from mingpt_ddp.data.download import download_path, fetch, matches, open_filesystem
from mingpt_ddp.data.file_records import FileRecords
from mingpt_ddp.data.text.archives import (
    Files,
    Member,
    OpenBytes,
    errors_of,
    expanded_limit,
    expands_too_far,
    members_of,
    opener,
    pieces_of,
    unzipped,
)
from mingpt_ddp.data.text.contents import Contents
from mingpt_ddp.data.text.record_files import RecordFiles, kind_of_one, look_at
from mingpt_ddp.data.text.split_names import Division, by_split
from mingpt_ddp.data.tokens.token_files import TokenFile, find_tokens, token_names
from mingpt_ddp.errors import DataError

BUILTIN = "builtin:python_docs"
CHUNK_BYTES = HEAD_BYTES  # so that the first chunk of a text is a head for kind_of
READING = 2  # raise it if the same files are read as another text
# Keys of data that do not say how a text is read, unless a reader of the user's does it.
READ_LATER = {
    *("name", "sha256", "cache_dir", "verify", "sources", "val_paths", "split_paths", "split"),
    *("block_size", "stride", "train_split", "test_split", "truncate", "tokenizer", "vocab_size"),
    "column",
}


@dataclass(frozen=True)
class Text:
    """A text that can be read again: as bytes in UTF-8, or as records, each a document.

    Attributes:
        hashed: opens what its SHA-256 is of: all, or files or documents, to read one by one.
        open: its bytes; None: it has records.
        records: iterates over its documents as strings; with `open`, of several files, over their
            bytes, with an empty piece after each; None: it is one document.
        files: the local files that it reads, known before any is read; None: unknown.
        form: how it is read, as `data.format`; never auto.
        tokens: files of them, instead of a text; they have neither bytes nor records.
    """

    contents: Contents  # known once it has been read
    hashed: Callable[[], Iterable[OpenBytes]]
    open: OpenBytes | None = None
    records: Callable[[], Iterator[Any]] | None = None
    files: list[Path] | None = None
    form: Form = "text"
    tokens: list[TokenFile] | None = None


def text_of_bytes(
    open_bytes: OpenBytes, contents: Contents, files: list[Path] | None = None
) -> Text:
    return Text(contents, lambda: [open_bytes], open_bytes, files=files)


def reading_keys(config: DataConfig) -> list[Any]:
    """Return what says how the files of a text are read, as JSON values."""
    if config.reader is not None:
        found = reader_of(config.reader)
        return [READING, vars(config), found and found[1]]
    return [READING, {key: value for key, value in vars(config).items() if key not in READ_LATER}]


def open_source(
    config: DataConfig,
    cache: Path,
    records: FileRecords,
    hash_texts: Callable[[dict[str, Text]], str],
    form: Form | None,
    by_name: bool,
) -> dict[str, Text]:
    """Return how to read a text, as ""; download a remote file into the cache first.

    Files whose names say their splits become several: `val` and `test`, and `train`, or "" without
    a `val`.

    Args:
        records: of the versions of downloads.
        hash_texts: called with the text of a download before it is kept; raises to refuse it.
        form: in which it is read; None: that of its content.
        by_name: let names of files say their splits.

    Raises:
        DataError: there is no text there.
    """

    def open_files(files: Files) -> dict[str, Text]:
        chosen = form or look_at(files)
        division = by_split(files, chosen, config.format == "auto") if by_name else Division()
        texts = {}
        for split, of_split in division.files.items():
            text = _open_files(config, of_split, chosen)
            text.contents.source = f"{config.source} ({split})"
            texts[split if split != "train" or "val" in division.files else ""] = text
        texts = texts or {"": _open_files(config, files, chosen)}
        next(iter(texts.values())).contents.note = division.note
        return texts

    def hash_download(path: Path) -> str:
        return hash_texts(open_files(_one_file(config, str(path))))

    if config.reader is not None:
        pieces = partial(_stream, lambda: _read_pieces(config))
        return {"": text_of_bytes(pieces, Contents(config.source), _files_of_reader(config))}
    assert config.path is not None
    if config.path == BUILTIN:
        content = python_docs().encode()
        bytes_of_it = partial(_stream, lambda: iter([content]))
        return {"": text_of_bytes(bytes_of_it, Contents(config.source), files=[])}
    target = download_path(config.path, cache)
    if target.exists() and config.sha256 and _accepts(hash_download, target):
        return open_files(_one_file(config, str(target)))
    _, name, is_local = open_filesystem(config.path)
    if not is_local:
        key = None if config.sha256 else reading_keys(config)
        fetch(config.path, target, records, key, hash_download)
        name = str(target)
    elif not os.path.exists(name) and glob.has_magic(name):
        return open_files(_several_files(config, *matches(name)))
    elif os.path.isdir(name):
        if os.path.realpath(name) == os.sep:  # files without end, as in /proc
            raise DataError(
                f"{config.source} is the root of the file system; name a directory of texts"
            )
        paths = []
        for at, _, files in os.walk(name):
            paths += [Path(at, file).relative_to(name).as_posix() for file in files]
        return open_files(_several_files(config, Path(name), paths))
    elif os.path.exists(name) and not os.path.isfile(name):
        raise DataError(f"{config.source} is not a regular file")
    return open_files(_one_file(config, name))


def _tokens_in(config: DataConfig, paths: list[str]) -> Text:
    tokens = find_tokens(paths, config)
    contents = Contents(config.source)
    for file in tokens if len(tokens) > 1 else ():
        contents.add_text(file.path, os.path.getsize(file.path))
    files = [Path(path) for path in paths]
    return Text(contents, lambda: [*map(opener, paths)], files=files, form="tokens", tokens=tokens)


def _one_file(config: DataConfig, path: str) -> Files:
    """Return a local file, or the members of an archive.

    Args:
        path: also of a download, whose name is that in its URL.
    """
    size = os.path.getsize(path)
    limit = expanded_limit(size, config.max_expansion)
    if open_members := members_of(path):
        return Files(config.source, open_members, {"": Path(path)}, limit)
    name = PurePosixPath(str(config.path).partition("?")[0]).name
    member = Member(name, size, opener(path))
    paths = {name: Path(path)}
    return Files(config.source, lambda: nullcontext([member]), paths, limit, is_one=True)


def _several_files(config: DataConfig, root: Path, names: list[str]) -> Files:
    """Return the files below `root`."""
    paths = {name: root / name for name in sorted(names) if (root / name).is_file()}
    members = []
    for name, path in paths.items():
        members.append(Member(name, path.stat().st_size, partial(unzipped, path)))
    size = sum(member.size for member in members)
    limit = expanded_limit(size, config.max_expansion)
    return Files(config.source, lambda: nullcontext([*members]), paths, limit)


def _open_files(config: DataConfig, files: Files, form: Form) -> Text:
    local = [*files.paths.values()]
    if form == "tokens":
        is_directory = not files.is_one and "" not in files.paths
        names = token_names(files.paths, config) if is_directory else files.paths
        return _tokens_in(config, [str(files.paths[name]) for name in names])
    if form != "text":
        records = RecordFiles(files, form, config)
        return Text(records.contents, records.hashed, None, records.records, local, form)
    if config.column is not None:
        raise DataError(
            f"data.column={config.column} needs a table; {config.source} is read as text"
        )
    if not files.is_one:
        return _joined(config, files)
    looks_like = kind_of_one(files) if config.format == "auto" else None
    return text_of_bytes(opener(local[0]), Contents(config.source, looks_like), local)


def python_docs() -> str:
    """Return the language reference that CPython's help() shows.

    It has 460,000 to 600,000 characters, by Python version.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class PiecesIO(io.RawIOBase):
    """Pieces of bytes as a stream that is never whole in memory."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")  # of the last piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raise what making the pieces raises."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        part = self._rest[: len(buffer)]
        self._rest = self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _stream(pieces: Callable[[], Iterator[bytes]]) -> io.BufferedReader:
    return io.BufferedReader(PiecesIO(pieces()), CHUNK_BYTES)


def _accepts(check: Callable[[Path], object], path: Path) -> bool:
    try:
        check(path)
    except DataError:
        return False
    return True


def _files_of_reader(config: DataConfig) -> list[Path] | None:
    """Return the files that a user's reader says that it reads; None: it does not say.

    Raises:
        CodeError: its function raised an exception; names its line.
    """
    found = reader_of(str(config.reader))
    if found is None or found[0].files is None:
        return None
    with attribute_errors_to_user_code():
        return [*map(Path, found[0].files(config))]


def _read_pieces(config: DataConfig) -> Iterator[bytes]:
    """Yield the pieces of a user's reader as UTF-8.

    Raises:
        CodeError: the reader raised an exception; names its line.
        DataError: the reader yields something other than text, or cannot read its source.
    """
    name = f"data.reader={config.reader}"
    with attribute_errors_to_user_code():
        try:
            for piece in BUILDERS["data"][str(config.reader)](config):
                try:
                    yield piece.encode()
                except (AttributeError, UnicodeEncodeError) as error:
                    raise DataError(f"{name} must yield text: {error}") from error
        except OSError as error:
            text = "its text" if config.path is None else config.source
            raise DataError(f"{name} cannot read {text}: {error}") from error


# Several texts in one: sorted by name, a line feed after each that has none.


def _joined(config: DataConfig, files: Files) -> Text:
    """Return how to open all texts as one; hidden files and those that are no text are skipped."""
    contents = Contents(config.source)

    def pieces(is_one: bool = True) -> Iterator[bytes]:
        contents.clear()
        total = 0
        with errors_of(config.source), files.open_members() as members:
            members.sort(key=lambda member: member.name)
            if config.format == "auto":
                contents.kind = kind_of_names({member.name for member in members})
            for member in members:
                begin = total
                for piece in pieces_of(member, config.format, contents, is_one):
                    total += len(piece)
                    if total > files.limit:
                        raise expands_too_far(config.source, files.limit)
                    yield piece
                if total > begin:
                    contents.add_text(member.name, member.size)
                    if not is_one:
                        yield b""
        if not contents.texts:
            raise contents.none_left()

    def documents() -> Iterator[OpenBytes]:
        rest = pieces(is_one=False)
        for first in rest:
            yield partial(_stream, partial(chain, [first], takewhile(bool, rest)))

    text = text_of_bytes(partial(_stream, pieces), contents, [*files.paths.values()])
    text = replace(text, records=partial(pieces, is_one=False))
    # where they end matters if tokens say it
    return replace(text, hashed=documents) if config.end_token else text
