"""Find the local files of a text, and recognize the split of a file by its name."""

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePath, PurePosixPath

from mingpt_ddp.config.builders import attribute_errors_to_user_code, reader_of
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.download import download, is_remote_glob, open_filesystem
from mingpt_ddp.data.file_kinds import SPLITS, is_hidden
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.errors import DataError

BUILTIN = "builtin:python_docs"
# Finds the name of a split in a file name, such as "train" in "wiki-train.txt".
SPLIT_NAME = re.compile(rf"(?:^|[-_.])({'|'.join(SPLITS)})[-_.]", re.IGNORECASE)


def files_of(config: DataConfig, source: str, cache: TextCache) -> list[Path] | None:
    """Find the files of a text, sorted by name. They are read in this order.

    Files at a URL are downloaded into the cache first. Hidden files of a directory are left out.

    Args:
        config: The settings of the data.
        source: Name of the text in messages.
        cache: The cache of downloads.

    Returns:
        The local files, or None if a user's reader does not say which files it reads.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The path names the root of the file system, or a file that is not a regular one.
        CodeError: The user's reader raised an exception.
    """
    if config.reader is not None:
        return _files_of_reader(config)
    assert config.path is not None
    if config.path == BUILTIN:
        return []
    name = _local_name(config.path)
    if name is None:
        return cache.downloaded(
            lambda: download(config.path or "", cache.root, config.sha256, cache.reads_all)
        )
    if os.path.isfile(name):
        return [Path(name)]
    if os.path.isdir(name):
        # The root holds endlessly many files, for example in /proc.
        if os.path.realpath(name) == os.sep:
            raise DataError(f"{source} is the root of the file system; name a directory of texts")
        root = Path(name)
        names = [
            Path(folder, each).relative_to(root)
            for folder, _, file_names in os.walk(root)
            for each in file_names
        ]
    elif glob.has_magic(name) and not os.path.exists(name):
        parts = PurePath(name).parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:fixed])
        found = glob.glob(os.path.join(*parts[fixed:]), root_dir=root, recursive=True)
        names = [*map(Path, found)]
    elif os.path.exists(name):
        raise DataError(f"{source} is not a regular file; name a file or a directory")
    else:
        raise FileNotFoundError(name)
    shown = sorted(each.as_posix() for each in names)
    return [root / each for each in shown if not is_hidden(each) and (root / each).is_file()]


def is_one_file(config: DataConfig) -> bool:
    """Return True if the path names a single file, False for a directory or a glob."""
    path = str(config.path)
    name = _local_name(path)
    return not is_remote_glob(path) if name is None else os.path.isfile(name)


def _local_name(url: str) -> str | None:
    """Return the path of a local URL, or None for a remote one."""
    if "://" in url and not url.startswith(("file://", "local://")):
        return None
    _, name, is_local = open_filesystem(url)
    return name if is_local else None


def _files_of_reader(config: DataConfig) -> list[Path] | None:
    """Ask a user's reader which files it reads. Return None if it does not say.

    Raises:
        CodeError: The reader's `files` raised an exception. The error names the line in its code.
    """
    known = reader_of(str(config.reader))
    files: Callable[[DataConfig], object] | None = known[0].files if known else None
    if files is None:
        return None
    with attribute_errors_to_user_code():
        return [*map(Path, files(config))]  # type: ignore[call-overload]


def check_splits(source: str, path: str, files: list[Path]) -> None:
    """Refuse a text whose files are named for several splits, such as train.txt and test.txt.

    Args:
        source: Name of the text in messages.
        path: The setting `data.path`.
        files: The files of the text.

    Raises:
        DataError: The files are named for several splits. The error shows settings that name the
            files of each split.
    """
    top = os.path.commonpath([file.parent for file in files])
    if "://" in path:
        first, *chain = path.split("::")
        base = first.partition("*")[0].rpartition("/")[0]
    else:
        base, chain = min(top, os.path.relpath(top), key=len), []
    all_names = [PurePosixPath(file.relative_to(top).as_posix()) for file in files]
    # The files of each split, and the word that stands for the split in the name of its first file.
    names: dict[str, list[PurePosixPath]] = {}
    words: dict[str, str] = {}
    for name in all_names:
        if word := _split_word(name):
            names.setdefault(SPLITS[word.lower()], []).append(name)
            words.setdefault(SPLITS[word.lower()], word)
    if len(names) < 2:
        return
    globs = {}
    are_exact = base == glob.escape(base)
    for split, word in words.items():
        is_directory = word in names[split][0].parts[:-1]
        matched = [
            name
            for name in all_names
            if (word in name.parts[:-1] if is_directory else word in name.name)
        ]
        are_exact = are_exact and matched == names[split]
        last = f"{word}/**" if is_directory else f"*{word}*"
        globs[split] = "::".join([f"{base}/**/{last}", *chain])
    shown = ", ".join(repr(str(of_split[0])) for of_split in names.values())
    train = globs.pop("train", "...")
    given = ", ".join(f'{split}: "{each}"' for split, each in globs.items())
    settings = "by globs in data.path and data.split_paths={val: GLOB}"
    # Globs that are not exact would put a file into two splits, or leave a file out.
    if are_exact:
        settings = f"as in 'data.path=\"{train}\"' 'data.split_paths={{{given}}}'"
    raise DataError(
        f"{source} has files that are named for several splits: {shown}; name each split, "
        f"{settings}, or read all files as one text with data.split_paths={{}}"
    )


def _split_word(name: PurePosixPath) -> str:
    """Find the word in a path that stands for a split: a directory, or part of the file's name.

    Return "" if there is none.
    """
    for part in name.parts[:-1]:
        if part.lower() in SPLITS:
            return part
    match = SPLIT_NAME.search(name.name)
    return match[1] if match else ""
