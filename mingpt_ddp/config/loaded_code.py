"""Record the user's Python files that this process has loaded, and their hashes.

A file is hashed once, when it is first seen. If the user edits it later, this process still runs
the old code.
"""

import contextlib
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed libraries
STANDARD_LIBRARY = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
# Files below these folders are not a user's: the standard library, this package, and its Hydra
# plugin.
LIBRARY_PREFIXES = tuple(
    f"{folder}/"
    for folder in (
        *STANDARD_LIBRARY,
        *(folder.resolve() for folder in STANDARD_LIBRARY),
        PACKAGE,
        PACKAGE.parent / "hydra_plugins",
    )
)


@dataclass(frozen=True)
class LoadedFile:
    """A user's file, as this process has loaded it."""

    sha256: str
    # Names and string constants in its code. These include the names of the modules it imports.
    words: frozenset[str]


_files: dict[Path, LoadedFile] = {}
_modules: dict[str, Path] = {}  # paths of the user's modules, by module name
_seen: set[str] = {"__main__"}  # names of all modules that `record_imports` has checked


def record_file(path: Path, content: bytes) -> None:
    """Record the hash and the words of a user's file, unless it has been recorded before."""
    if path not in _files:
        words = frozenset[str]()
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            words = frozenset(_words_of(compile(content, str(path), "exec")))
        _files[path] = LoadedFile(hashlib.sha256(content).hexdigest(), words)


def record_imports() -> None:
    """Record the user's files that have been imported since the last call."""
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        if name not in _seen:
            _seen.add(name)
            if path := _user_path(name, module):
                _modules[name] = path
                _read_and_record(path)


def loaded_files(roots: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of files and of the files that they have imported so far, by path.

    A process that runs several jobs has also loaded files of other jobs. A module therefore counts
    as imported by a file only if the code of the file contains its name.

    Args:
        roots: Resolved paths of files that have been run.
    """
    record_imports()
    hashes = {}
    left = [*roots]
    while left:
        path = left.pop()
        if path in hashes or path not in _files:
            continue
        file = _files[path]
        hashes[path] = file.sha256
        for name, imported in _modules.items():
            last = name.rpartition(".")[2]
            is_package_of = any(word.startswith(f"{name}.") for word in file.words)
            if is_package_of or {name, last} & file.words:
                left.append(imported)
    return hashes


def names_in(roots: Iterable[Path]) -> frozenset[str]:
    """Return all names and string constants in the code of files and of the files they import."""
    return frozenset().union(*(_files[path].words for path in loaded_files(roots)))


def loaded_sha256(path: Path) -> str | None:
    """Return the SHA-256 that a file had when it was loaded. None if it is not loaded."""
    return _files[path].sha256 if path in _files else None


def paths_loaded(sha256: str) -> list[Path]:
    """Return the paths of the loaded user's files whose content has this SHA-256."""
    return [path for path, file in _files.items() if file.sha256 == sha256]


def script_path() -> Path | None:
    """Return the path of the script that Python was started with, and record its content."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    _read_and_record(path)
    return path


def _read_and_record(path: Path) -> None:
    with contextlib.suppress(OSError):
        record_file(path, path.read_bytes())


def _user_path(name: str, module: object) -> Path | None:
    """Return the resolved path of a module if it is a user's Python file, else None."""
    # Read __dict__, because getattr would run the __getattr__ of lazy modules.
    file = getattr(module, "__dict__", {}).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    if name.partition(".")[0] == PACKAGE.name or file.startswith(LIBRARY_PREFIXES):
        return None
    if INSTALLED & {*Path(file).parts}:
        return None
    path = Path(file).resolve()
    return None if str(path).startswith(LIBRARY_PREFIXES) else path


def _words_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names and string constants in code and in its functions.

    A string constant may name a module, as in import_module("helper").
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _words_of(constant)
        elif isinstance(constant, str):
            yield constant
