"""Files whose names say to which split they belong, as train-00000-of-00002.parquet."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from mingpt_ddp.config.keys.components import Form
from mingpt_ddp.data.file_kinds import SPLITS
from mingpt_ddp.data.text.archives import Files, Member
from mingpt_ddp.data.text.contents import Share
from mingpt_ddp.data.text.record_files import is_left_out, kinds_of, look_at
from mingpt_ddp.data.tokens.token_files import TOKEN_SUFFIXES

NAMED = re.compile(rf"(?:^|[-_.])({'|'.join(SPLITS)})[-_.]", re.IGNORECASE)


@dataclass(frozen=True)
class Division:
    """What the names of files say.

    Attributes:
        files: those of each split, `train` first; or all, which are one text, as "".
        note: for the log: which are left out, or trained on in spite of their names.
    """

    files: dict[str, Files]
    note: str = ""


def by_split(files: Files, form: Form, by_content: bool) -> Division:
    """Divide files by their names, or say why not.

    They are divided if there are files to train on and others, these have most of the bytes that
    would be read, and no file without a split has an end of its name that one of theirs has. So a
    README among them belongs to no split, and a `train.sh` among texts makes none.

    Args:
        form: in which they are read.
        by_content: their content has decided it.
    """
    undivided = Division({"": files})
    if files.is_one:
        return undivided
    named: dict[str, list[Member]] = {"train": [], "val": [], "test": [], "": []}
    with files.opened() as members:
        for member in members:
            if not is_left_out(member.name):
                named[_split_of(_path(member))].append(member)
        unnamed = named.pop("")
        held_out = named["val"] + named["test"]
        if not held_out:
            return undivided
        shards = {split: _among(files, shard) for split, shard in named.items() if shard}
        ends = {_path(member).suffix for shard in named.values() for member in shard}
        same = [member.name for member in unnamed if _path(member).suffix in ends]
        read = _names_read(files, members, form, by_content)
        others = [member for member in unnamed if member.name in read]
        if not named["train"]:
            why = "no file is named train"
        elif same:
            why = f"{same[0]!r} has the same extension and no split in its name"
        elif _share(named["train"] + held_out).size <= _share(others).size:
            why = "most bytes are in files without a split in their names"
        elif by_content and {*map(look_at, shards.values())} != {form}:
            why = "the splits have different formats"
        else:
            left_out = _share(unnamed).shown("without a split in the name")
            return Division(shards, f"left out {left_out}" if unnamed else "")
        trained = _share([member for member in held_out if member.name in read])
    if not trained.count:
        return undivided
    return replace(
        undivided,
        note=f"trains on {trained.shown('named val or test')} too, because {why}; "
        "data.split_paths={} says that this is meant; to divide them, name the training text by a "
        "glob and the others in data.split_paths",
    )


def _path(member: Member) -> PurePosixPath:
    return PurePosixPath(member.name)


def _split_of(path: PurePosixPath) -> str:
    """Return the split that a directory of a file says, else that of its name; "": none."""
    for part in path.parts[:-1]:
        if part.lower() in SPLITS:
            return SPLITS[part.lower()]
    match = NAMED.search(path.name)
    return SPLITS[match[1].lower()] if match else ""


def _names_read(files: Files, members: list[Member], form: Form, by_content: bool) -> set[str]:
    """Return which files are read if all are one text."""
    if form == "tokens":
        return {member.name for member in members if member.name.endswith(TOKEN_SUFFIXES)}
    if form == "text" and not by_content:
        return {member.name for member in members}
    kinds = zip(members, kinds_of(files, members), strict=True)
    return {member.name for member, kind in kinds if kind.form == form}


def _share(members: list[Member]) -> Share:
    share = Share()
    for member in members:
        share.add(member.name, member.size)
    return share


def _among(files: Files, some: list[Member]) -> Files:
    """Return those of the files that have the names of some of them."""
    names = {member.name for member in some}

    @contextmanager
    def open_members() -> Iterator[list[Member]]:
        with files.open_members() as members:
            yield [member for member in members if member.name in names]

    paths = {name: path for name, path in files.paths.items() if name in names or not name}
    return replace(files, open_members=open_members, paths=paths)
