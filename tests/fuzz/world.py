"""Prepare the working directory for each case, and find out what a command has changed in it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

from fuzz.hostile_files import HOSTILE, clone, edit, make_hostile, make_valid, remove

from mingpt_ddp.snapshots.format import MANIFEST, encode_manifest


def copy(source: str, target: str) -> None:
    clone(Path(source), Path(target))


def replace(source: str, target: str) -> None:
    """Replace a file by a hostile file. If that does not exist, only remove the file."""
    remove(Path(target))
    with contextlib.suppress(FileNotFoundError):
        clone(Path(source), Path(target))


def truncate(name: str, share: float) -> None:
    path = Path(name)
    if path.is_file():
        os.truncate(path, int(share * path.stat().st_size))
    else:
        remove(path)


def edit_file(name: str, at: float, value: Any) -> None:
    if Path(name).is_file():
        edit(Path(name), at, value)
    else:
        remove(Path(name))


def sign(name: str) -> None:
    """Rewrite the manifest of a snapshot, so that it matches the damaged files."""
    files = {}
    for path in sorted(Path(name).iterdir()) if Path(name).is_dir() else ():
        if path.name != MANIFEST and path.is_file() and path.stat().st_size < 1 << 30:
            content = path.read_bytes() if not path.is_symlink() else b""
            files[path.name] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    if files:
        Path(name, MANIFEST).write_bytes(encode_manifest(4, files))


STEPS = {"copy": copy, "replace": replace, "truncate": truncate, "edit": edit_file, "sign": sign}


def listing(root: Path, *names: str) -> dict[str, Any]:
    """Return the mode, size and time of each file below `root`, which show any change."""
    found: dict[str, Any] = {}
    for at, directories, files in itertools.chain.from_iterable(
        os.walk(root / name) for name in names
    ):
        for name in directories:
            found[os.path.relpath(os.path.join(at, name), root)] = "directory"
        for name in files:
            status = os.lstat(os.path.join(at, name))
            found[os.path.relpath(os.path.join(at, name), root)] = (
                status.st_mode,
                status.st_size,
                status.st_mtime_ns,
            )
    return found


class World:
    """A working directory, a cache and a temporary directory, which are restored between cases."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cwd, self.cache, self.tmp = directory / "cwd", directory / "cache", directory / "tmp"
        self.template = directory / "template"
        for path in (self.template, self.cache, self.tmp, directory / "home"):
            path.mkdir(parents=True)
        self.pristine: dict[str, Any] = {}
        names = {"XDG_CACHE_HOME": self.cache, "TMPDIR": self.tmp, "HOME": directory / "home"}
        self.environ = {**os.environ, **{name: str(path) for name, path in names.items()}}

    def make(self) -> None:
        """Write the hostile and the valid files for the cases."""
        os.chdir(self.template)
        make_hostile(self.template / HOSTILE)
        make_valid(self.template)

    def restore(self) -> None:
        """Remove the files that a case has made, and restore those that it has changed."""
        self.cache.mkdir(exist_ok=True)  # a refused run removes an empty cache directory
        for path in (
            *self.cache.iterdir(),
            *self.tmp.iterdir(),
            *self.cwd.glob("mutant*"),
            *self.cwd.glob("outputs"),
        ):
            remove(path)
        if not self.pristine or listing(self.directory, "cwd") != self.pristine:
            remove(self.cwd)
            clone(self.template, self.cwd)
            self.pristine = listing(self.directory, "cwd")
        os.chdir(self.cwd)

    def listing(self) -> dict[str, Any]:
        import fsspec

        files = listing(self.directory, "cwd", "cache", "tmp")
        return files | {f"memory:/{name}": 0 for name in fsspec.filesystem("memory").store}
