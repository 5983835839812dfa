"""Open texts: a file, a directory, a glob, an archive, a URL, or what a user's reader yields."""

import contextlib
import glob
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from mingpt_ddp.config.builders import BUILDERS, attribute_errors_to_user_code, reader_of
from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.data.download import download_path, fetch, matches, open_filesystem
from mingpt_ddp.data.file_kinds import kind_of_names
from mingpt_ddp.data.text.archives import (
    DAMAGES,
    Files,
    Member,
    decompressed,
    expanded_limit,
    members_of,
    pieces_of,
    unzipped,
)
from mingpt_ddp.data.text.contents import Contents, Counts
from mingpt_ddp.data.text.opened_text import (
    Text,
    bytes_of,
    documents,
    pieces_in,
    reading_keys,
    sha256_of_all,
    text_of_bytes,
)
from mingpt_ddp.data.text.record_files import RecordFiles, kind_of_one, look_at
from mingpt_ddp.data.text.split_names import Division, by_split
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokens.token_files import find_tokens, token_names
from mingpt_ddp.errors import DataError

BUILTIN = "builtin:python_docs"


def open_source(
    config: DataConfig, source: str, cache: TextCache, form: Form | None, by_name: bool
) -> list[Text]:
    """Return the text of a configuration; download a remote file into the cache first.

    Files whose names say their splits become several: `val` and `test`, and `train`, or "" without
    a `val`.

    Args:
        source: what messages call the text.
        form: in which it is read; None: that of its content.
        by_name: let names of files say their splits.

    Raises:
        DataError: there is no text there.
    """
    if config.reader is not None:
        pieces = partial(_read_pieces, config, source)
        return [text_of_bytes(config, Contents(source), pieces, _files_of_reader(config))]
    assert config.path is not None
    if config.path == BUILTIN:
        return [text_of_bytes(config, Contents(source), _python_docs_pieces, files=[])]

    def open_file(path: Path) -> list[Text]:
        return _open_files(config, _one_file(config, source, path), form, by_name)

    def hash_download(path: Path) -> str:
        return sha256_of_all(cache.hashed(config, open_file(path)))

    target = download_path(config.path, cache.root)
    if config.sha256 and target.exists():
        with contextlib.suppress(DataError):
            hash_download(target)
            return open_file(target)
    _, name, is_local = open_filesystem(config.path)
    if not is_local:
        cache.note_copy(config.path, target)
        key = None if config.sha256 else reading_keys(config)
        fetch(config.path, target, cache.records, key, hash_download)
        return open_file(target)
    if glob.has_magic(name) and not os.path.exists(name):
        return _open_files(config, _several_files(config, source, *matches(name)), form, by_name)
    if os.path.isdir(name):
        if os.path.realpath(name) == os.sep:  # files without end, as in /proc
            raise DataError(f"{source} is the root of the file system; name a directory of texts")
        root = Path(name)
        names = [path.relative_to(root).as_posix() for path in _files_below(root)]
        return _open_files(config, _several_files(config, source, root, names), form, by_name)
    if os.path.exists(name) and not os.path.isfile(name):
        raise DataError(f"{source} is not a regular file")
    return open_file(Path(name))


def _files_below(root: Path) -> Iterator[Path]:
    for at, _, names in os.walk(root):
        for name in names:
            yield Path(at, name)


def _one_file(config: DataConfig, source: str, path: Path) -> Files:
    """Return a local file, or the members of an archive.

    Args:
        path: also of a download, whose name is that in its URL.
    """
    size = path.stat().st_size
    limit = expanded_limit(size, config.max_expansion)
    if open_members := members_of(path):
        return Files(source, open_members, {"": path}, limit)
    name = PurePosixPath(str(config.path).partition("?")[0]).name
    member = Member(name, size, partial(open, path, "rb"))
    return Files(source, lambda: nullcontext([member]), {name: path}, limit, is_one=True)


def _several_files(config: DataConfig, source: str, root: Path, names: list[str]) -> Files:
    """Return the files below `root`."""
    paths = {name: root / name for name in sorted(names) if (root / name).is_file()}
    members = []
    for name, path in paths.items():
        members.append(Member(name, path.stat().st_size, partial(unzipped, path)))
    limit = expanded_limit(sum(member.size for member in members), config.max_expansion)
    return Files(source, lambda: nullcontext([*members]), paths, limit)


def _open_files(config: DataConfig, files: Files, form: Form | None, by_name: bool) -> list[Text]:
    """Return the text of files, or those of the splits that their names say."""
    form = form or look_at(files)
    division = Division({"": files})
    if by_name:
        division = by_split(files, form, config.format == "auto")
    texts = []
    for split, of_split in division.files.items():
        text = _open_as(form, config, of_split)
        if split:
            text.contents.part = f" ({split})"
        is_divided = split == "train" and "val" not in division.files
        texts.append(replace(text, split="" if is_divided else split))
    texts[0].contents.note = division.note
    return texts


def _open_as(form: Form, config: DataConfig, files: Files) -> Text:
    """Return the text of files that are read in one format."""
    paths = [*files.paths.values()]
    if form == "tokens":
        return _open_tokens(config, files)
    if form != "text":
        rows = RecordFiles(files, form, config)
        read = partial(documents, rows.texts, config.end_token)
        return Text(config, rows.contents, rows.hashed, read, paths)
    if config.column is not None:
        raise DataError(
            f"data.column={config.column} needs a table; {files.source} is read as text"
        )
    contents = Contents(files.source)
    if not files.is_one:
        return text_of_bytes(config, contents, partial(_joined, config, files, contents), paths)
    if config.format == "auto":
        contents.counts.kind = kind_of_one(files)
    decompressed_bytes = partial(_decompressed_bytes, paths[0], files)
    text = text_of_bytes(config, contents, decompressed_bytes, paths)
    return replace(text, hashed=partial(bytes_of, paths))


def _open_tokens(config: DataConfig, files: Files) -> Text:
    is_directory = not files.is_one and "" not in files.paths
    names = token_names(files.paths, files.source) if is_directory else files.paths
    paths = [files.paths[name] for name in names]
    tokens = find_tokens([str(path) for path in paths], files.source, config.dtype)
    contents = Contents(files.source, form="tokens")
    for path in paths if len(paths) > 1 else ():
        contents.add_text(str(path), path.stat().st_size)
    return Text(config, contents, partial(bytes_of, paths), lambda: iter(()), paths, tokens)


def python_docs() -> str:
    """Return the language reference that CPython's help() shows.

    It has 460,000 to 600,000 characters, by Python version.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _python_docs_pieces() -> Iterator[bytes]:
    yield python_docs().encode()
    yield b""


def _files_of_reader(config: DataConfig) -> list[Path] | None:
    """Return the files that a user's reader says that it reads; None: it does not say.

    Raises:
        CodeError: its function raised an exception; names its line.
    """
    known = reader_of(str(config.reader))
    if known is None:
        return None
    entry, _ = known
    if entry.files is None:
        return None
    with attribute_errors_to_user_code():
        return [*map(Path, entry.files(config))]


def _read_pieces(config: DataConfig, source: str) -> Iterator[bytes]:
    """Yield the pieces of a user's reader as UTF-8, and an empty one at its end.

    Raises:
        CodeError: the reader raised an exception; names its line.
        DataError: the reader yields something other than text, or cannot read its source.
    """
    name = f"data.reader={config.reader}"
    with attribute_errors_to_user_code():
        try:
            for piece in BUILDERS["data"][str(config.reader)](config):
                try:
                    encoded = piece.encode()
                except (AttributeError, UnicodeEncodeError) as error:
                    raise DataError(f"{name} must yield text: {error}") from error
                if encoded:
                    yield encoded
        except OSError as error:
            text = "its text" if config.path is None else source
            raise DataError(f"{name} cannot read {text}: {error}") from error
    yield b""


def _decompressed_bytes(path: Path, files: Files) -> Iterator[bytes]:
    """Yield the bytes of a text, decompressed, and an empty piece at the end.

    Raises:
        DataError: a damaged compressed file, or one that expands too far.
    """
    size = 0
    with open(path, "rb") as raw:
        try:
            for piece in pieces_in(decompressed(raw)):
                size += len(piece)
                files.check_size(size)
                yield piece
        except DAMAGES as error:
            message = f"{files.source} is not a whole compressed file: {error}"
            raise DataError(message) from error


def _joined(config: DataConfig, files: Files, contents: Contents) -> Iterator[bytes]:
    """Yield the bytes of several texts, sorted by name; hidden files and other data are skipped.

    They are one document, with a line feed after each that has none; with `data.end_token` each is
    a document.
    """
    contents.counts = Counts()
    size = 0
    with files.opened() as members:
        members.sort(key=lambda member: member.name)
        if config.format == "auto":
            contents.counts.kind = kind_of_names({member.name for member in members})
        for member in members:
            begin = size
            for piece in pieces_of(member, config.format, contents, not config.end_token):
                size += len(piece)
                files.check_size(size)
                yield piece
            if size > begin:
                contents.add_text(member.name, member.size)
                if config.end_token:
                    yield b""
    if not contents.counts.texts:
        raise contents.none_left()
    if not config.end_token:
        yield b""
