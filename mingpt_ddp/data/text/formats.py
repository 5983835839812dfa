"""Decide the format of a text: that of its single file, or of most bytes of several files."""

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.data.file_kinds import (
    DAMAGES,
    HEAD_BYTES,
    NOT_UTF8,
    READ,
    TAR,
    TEXT,
    ZIP,
    decompressed,
    is_utf8,
    kind_of_file,
)
from mingpt_ddp.data.tokens.token_files import TOKEN_SUFFIXES
from mingpt_ddp.errors import DataError

MAX_NAMES = 3  # names of files in a line of the log
MAX_NAME = 100  # characters


@dataclass(frozen=True)
class Selection:
    """The files that are read in one format, and a line for the log that names skipped files."""

    form: Form
    files: list[Path]
    skipped: str = ""


def format_of_file(path: Path, form: Form, config: DataConfig, source: str) -> Form:
    """Return the format of a single file.

    Args:
        form: The given format, or auto.
        source: Name of the text in messages.

    Raises:
        DataError: The file is not a text. The error says what to do.
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
            f"{source} is neither lines of JSON objects nor an array of them; {READ}, or set "
            "data.format=text to read it as it is"
        )
    return kind.form or "text"


def select_files(
    files: list[Path], form: Form, config: DataConfig, source: str, is_new: bool
) -> Selection:
    """Keep the files of one format: the given one, or the one that most bytes have.

    Raises:
        DataError: No file has it; or, in a new run, its files do not have most of the bytes.
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
        forms: list[Form] = [each for each in get_args(Form) if each in bytes_of]
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
        parts = [f"{len(paths):,} {kind} {shown(paths, files)}" for kind, paths in ordered]
        line = f"skipped {', '.join(parts)}"
    if not read:
        what = "texts" if form == "text" else f"files of data.format={form}"
        raise DataError(f"{source} has no {what}" + (line and f": {line}; {advice}"))
    if 2 * size > total and is_new and config.format == "auto":
        raise DataError(
            f"{source} is mostly not {form}: {line}, {size:,} of {total:,} bytes; name its texts "
            f"alone by a glob, or {advice}"
        )
    return Selection(form, read, line)


def shown(paths: list[Path], files: list[Path]) -> str:
    """Return the first names, as in `('a.txt', 'b.txt', 'c.txt', ...)`.

    Args:
        files: All files, whose common directory is left out.
    """
    top = os.path.commonpath([path.parent for path in files])
    names = [os.path.relpath(path, top) for path in paths[:MAX_NAMES]]
    texts = [repr(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...") for name in names]
    return f"({', '.join([*texts, *['...'] * (len(paths) > MAX_NAMES)])})"


def _is_utf8_file(path: Path) -> bool:
    with open(path, "rb") as raw:
        try:
            return is_utf8(decompressed(raw).read(HEAD_BYTES))
        except DAMAGES:  # damage is reported when the file is read
            return True


def refuse_holes(files: list[Path]) -> None:
    """Refuse a sparse file: its holes read as NUL bytes, of which there may be a terabyte.

    Raises:
        DataError: It names the file.
    """
    for path in files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size:
                raise DataError(
                    f"{path} has holes, as an unfinished download does, and is not text; "
                    "copy it again"
                )
