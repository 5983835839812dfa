"""Files of records: which format files have, and their records, one file after the other."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, get_args

from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.data.file_kinds import (
    ARROW,
    CSV,
    HEAD_BYTES,
    HIDDEN,
    JSON_LINES,
    PARQUET,
    TEXT,
    Kind,
    is_hidden,
    kind_of,
    kind_of_names,
)
from mingpt_ddp.data.text.archives import (
    DAMAGES,
    Files,
    Member,
    decompressed,
)
from mingpt_ddp.data.text.contents import Contents, Counts, Records
from mingpt_ddp.data.text.json_and_csv import (
    Table,
    choose_column,
    csv_table,
    json_table,
)
from mingpt_ddp.data.text.opened_text import bytes_of
from mingpt_ddp.data.text.parquet import column_table
from mingpt_ddp.errors import DataError

COMPRESSION = re.compile(r"\.(gz|bz2|xz|zst)$")
SUFFIXES: dict[str, Kind] = {  # of files that have a format whatever they look like
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
}
READERS: dict[str, Callable[[Any, str], Table]] = {
    "jsonl": json_table,
    "parquet": column_table,
    "csv": csv_table,
}
# Files that `datasets` writes in a save_to_disk folder, besides the data.
NO_RECORDS = re.compile(r"(cache-.*\.arrow|dataset_info\.json|dataset_dict\.json|state\.json)")


def look_at(files: Files) -> Form:
    """Return the format that most bytes of files have, by their content."""
    sizes: Counter[str | None] = Counter()
    with files.opened() as members:
        if kind := kind_of_names({member.name for member in members}):
            sizes[kind.form] = 1
            members = []
        for member, kind in zip(members, kinds_of(files, members), strict=True):
            sizes[kind.form] += member.size
    forms: list[Form] = [form for form in get_args(Form) if form in sizes]
    return max(forms, key=sizes.__getitem__, default="text")


def kind_of_one(files: Files) -> Kind | None:
    """Return what a single file looks like; None: text."""
    with files.opened() as members:
        [kind] = kinds_of(files, members)
    return None if kind == TEXT else kind


def is_left_out(name: str) -> bool:
    """Return whether a file among several is no text and no data, by its name."""
    return is_hidden(name) or bool(NO_RECORDS.fullmatch(PurePosixPath(name).name))


def kinds_of(files: Files, members: list[Member]) -> list[Kind]:
    """Return the kinds of the members, HIDDEN for one among several that is left out.

    Each head is read once, in the order of the archive: a step back in a compressed archive
    decompresses it again from its beginning.

    Args:
        members: open ones of the files, in this order.
    """
    kinds = []
    for member in members:
        key = member.name, member.size
        if key not in files.kinds:
            is_skipped = is_left_out(member.name) and not files.is_one
            files.kinds[key] = HIDDEN if is_skipped else _kind_of_member(member)
        kinds.append(files.kinds[key])
    return kinds


def _kind_of_member(member: Member) -> Kind:
    suffix = PurePosixPath(COMPRESSION.sub("", member.name)).suffix.lower()
    if suffix in SUFFIXES and member.size:
        return SUFFIXES[suffix]
    try:
        with member.open() as raw, decompressed(raw) as file:
            head = file.read(HEAD_BYTES)
    except DAMAGES:  # which are reported when it is read
        return TEXT
    return kind_of(head) or TEXT


class RecordFiles:
    """Files of one format, each of records; other ones and hidden ones are skipped.

    Attributes:
        contents: known once `hashed` or `texts` has been called.
    """

    def __init__(self, files: Files, form: Form, config: DataConfig) -> None:
        self._files = files
        self._column = config.column
        self.contents = Contents(files.source, form=form)

    def hashed(self) -> Iterator[bytes]:
        """Return the bytes of the files in pieces, or those of the archive that they are in."""
        paths = self._files.paths
        with self._files.opened() as members:
            selected = [paths.get(member.name) for member in self._selected(members)]
        return bytes_of([path for path in selected if path] or [paths[""]])

    def texts(self) -> Iterator[str]:
        """Yield the texts of all rows but those that are null or empty.

        Raises:
            DataError: names the file and the row that cannot be read.
        """
        read = Records(self._column)
        size = 0
        with self._files.opened() as members:
            for i, member in enumerate(self._selected(members)):
                for text in self._texts_of(member, read, is_first=i == 0):
                    size += len(text)
                    self._files.check_size(size)
                    yield text
        self.contents.records = read

    def _texts_of(self, member: Member, read: Records, is_first: bool) -> Iterator[str]:
        form = self.contents.form
        where = self._files.source
        if not self._files.is_one:
            where = f"{where}: {member.name}"
        try:
            with member.open() as raw, decompressed(raw) as file:
                table = READERS[form](file, where)
                if is_first or form != "jsonl":  # whose rows may lack the key
                    read.column = choose_column(table, read.column, where)
                for text in table.values(str(read.column)):
                    if text:
                        read.count += 1
                        yield text
                    else:
                        read.empty += 1
        except DAMAGES as error:
            raise DataError(f"{where} is damaged or cut off: {error}") from error

    def _selected(self, members: list[Member]) -> Iterator[Member]:
        """Yield the files of the format by their names, and count all."""
        contents = self.contents
        contents.counts = Counts()
        if self._files.is_one:
            yield from members
            return
        kinds = kinds_of(self._files, members)
        ordered = sorted(zip(members, kinds, strict=True), key=lambda pair: pair[0].name)
        for member, kind in ordered:
            if member.size and kind.form == contents.form:
                contents.add_text(member.name, member.size)
                yield member
            elif member.size:
                contents.skip(member.name, member.size, kind)
        if not contents.counts.texts:
            raise contents.none_left()
