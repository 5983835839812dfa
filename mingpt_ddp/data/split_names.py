"""Files whose names say to which split they belong, as train-00000-of-00002.parquet."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath

from mingpt_ddp.data.archives import Files, Member, errors_of
from mingpt_ddp.data.content import is_hidden
from mingpt_ddp.data.record_files import NO_RECORDS

SPLITS = {"train": "train", "validation": "val", "val": "val", "test": "test"}
NAMED = re.compile(r"(?:^|[-_.])(train|validation|val|test)[-_.]")


def by_split(files: Files) -> dict[str, Files]:
    """Return the files of each split, `train` first; {} if their names do not say it.

    They do if there are files to train on and others, and no file without a split has an end of its
    name that one of theirs has. So a README among them belongs to no split.
    """
    found: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    others = set()
    with errors_of(files.source), files.open_members() as members:
        paths = [PurePosixPath(member.name) for member in members]
    for path in paths:
        if is_hidden(str(path)) or NO_RECORDS.fullmatch(path.name):
            continue
        split = _split_of(path)
        if split is None:
            others.add(path.suffix)
        else:
            found[split].add(str(path))
    ends = {PurePosixPath(name).suffix for named in found.values() for name in named}
    if not found["train"] or not (found["val"] or found["test"]) or others & ends:
        return {}
    return {split: _among(files, named) for split, named in found.items() if named}


def _split_of(path: PurePosixPath) -> str | None:
    """Return the split that the name of a file says, or that of its directory."""
    if match := NAMED.search(path.name):
        return SPLITS[match[1]]
    return SPLITS.get(path.parent.name)


def _among(files: Files, names: set[str]) -> Files:
    """Return those of the files that have one of the names."""

    @contextmanager
    def open_members() -> Iterator[list[Member]]:
        with files.open_members() as members:
            yield [member for member in members if member.name in names]

    paths = {name: path for name, path in files.paths.items() if name in names or not name}
    return replace(files, open_members=open_members, paths=paths)
