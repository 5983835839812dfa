"""Decide the format of a text.

A text of one file has the format of that file. If there are several files, the text has the format
that holds most of the bytes.
"""

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from mingpt_ddp.config.keys.components import DataConfig, TextFormat
from mingpt_ddp.data.file_kinds import (
    DAMAGES,
    HEAD_BYTES,
    NOT_UTF8,
    TAR,
    TEXT,
    USE_READER,
    ZIP,
    decompressed,
    is_utf8,
    kind_of_file,
)
from mingpt_ddp.data.tokens.token_files import TOKEN_SUFFIXES
from mingpt_ddp.errors import DataError, counted

MAX_NAMES = 3  # number of file names in a line of the log
MAX_NAME_CHARS = 100


@dataclass(frozen=True)
class Selection:
    """The files of a text that have the same format.

    Attributes:
        form: The format.
        files: The files in this format, which are read.
        skipped: A line for the log that names the other files, or "" if there are none.
    """

    form: TextFormat
    files: list[Path]
    skipped: str = ""


def format_of_file(path: Path, form: TextFormat, config: DataConfig, source: str) -> TextFormat:
    """Decide the format of a single file.

    Args:
        path: Path of the file.
        form: The format from the configuration, which may be auto, or from a snapshot.
        config: The settings of the data.
        source: Name of the text in messages.

    Raises:
        DataError: The file is not a text. The error says how to read it.
    """
    if form not in ("auto", "text"):
        return form
    kind = kind_of_file(path)
    if kind in (ZIP, TAR) or (form == "auto" and kind.form is None and kind != NOT_UTF8):
        raise kind.refusal(source, str(config.path), "text")
    if form == "text":
        return form
    if kind == TEXT and path.suffix == ".json" and path.stat().st_size:
        raise DataError(
            f"{source} is neither lines of JSON objects nor an array of them; {USE_READER}, or set "
            "data.format=text to read it as it is"
        )
    return kind.form or "text"


def select_files(
    files: list[Path], form: TextFormat, config: DataConfig, source: str, is_new: bool
) -> Selection:
    """Keep the files that have the given format. `auto` is the format with most bytes.

    Args:
        files: The files of the text.
        form: The format from the configuration, which may be auto, or from a snapshot.
        config: The settings of the data.
        source: Name of the text in messages.
        is_new: True in a new run, False if a snapshot is resumed.

    Raises:
        DataError: No file has the format. Or in a new run with data.format=auto, the skipped files
            have more bytes than the files to read.
    """
    if form == "tokens":
        tokens = [path for path in files if path.name.endswith(TOKEN_SUFFIXES)]
        if not tokens:
            raise DataError(f"{source} has no files that end with .bin or .npy")
        return Selection(form, tokens)
    kinds = {path: kind_of_file(path) for path in files}
    sizes = {path: path.stat().st_size for path in files}
    if form == "auto":
        bytes_of: Counter[str | None] = Counter()
        for path in files:
            bytes_of[kinds[path].form] += sizes[path]
        forms: list[TextFormat] = [each for each in get_args(TextFormat) if each in bytes_of]
        form = max(forms, key=bytes_of.__getitem__, default="text")
    read: list[Path] = []
    skipped: dict[str, list[Path]] = defaultdict(list)
    for path in filter(sizes.__getitem__, files):
        is_read = kinds[path].form == form
        if config.format == "text":
            is_read = _is_utf8_file(path)
        (read if is_read else skipped[kinds[path].name]).append(path)
    left_out = [path for paths in skipped.values() for path in paths]
    size = sum(sizes[path] for path in left_out)
    total = size + sum(sizes[path] for path in read)
    line = advice = ""
    if left_out:
        advice = kinds[max(left_out, key=sizes.__getitem__)].advice
        ordered = sorted(skipped.items(), key=lambda item: -len(item[1]))
        parts = []
        for name, paths in ordered:
            looks = "that looks" if len(paths) == 1 else "that look"
            parts.append(f"{counted(len(paths), 'file')} {looks} like {name} {shown(paths, files)}")
        line = f"skipped {', '.join(parts)}"
    if not read:
        what = "texts" if form == "text" else f"files of data.format={form}"
        raise DataError(f"{source} has no {what}" + (line and f": {line}; {advice}"))
    if 2 * size > total and is_new and config.format == "auto":
        raise DataError(
            f"{source} is mostly not {form}: {line}, {size:,} of {total:,} bytes; name only its "
            f"texts, by a glob, or {advice}"
        )
    return Selection(form, read, line)


def shown(paths: list[Path], files: list[Path]) -> str:
    """Format the first names of a list, as in `('a.txt', 'b.txt', 'c.txt', ...)`.

    Args:
        paths: The files to name.
        files: All files of the text. Names leave out the directory that these have in common.
    """
    top = os.path.commonpath([path.parent for path in files])
    names = [os.path.relpath(path, top) for path in paths[:MAX_NAMES]]
    texts = [
        repr(name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}...")
        for name in names
    ]
    return f"({', '.join([*texts, *['...'] * (len(paths) > MAX_NAMES)])})"


def _is_utf8_file(path: Path) -> bool:
    with open(path, "rb") as raw:
        try:
            return is_utf8(decompressed(raw).read(HEAD_BYTES))
        # Damage is reported later, when the file is read as text.
        except DAMAGES:
            return True


def refuse_holes(files: list[Path]) -> None:
    """Refuse sparse files. Their holes read as NUL bytes, perhaps a terabyte of them.

    Raises:
        DataError: A file has holes. The error names it.
    """
    for path in files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:
                raise DataError(
                    f"{path} has holes, as an unfinished download does, and is not text; "
                    "copy it again"
                )
