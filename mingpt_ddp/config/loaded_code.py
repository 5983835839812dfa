"""The user's Python files that this process has loaded, each with the SHA-256 that it had then.

A file is hashed once, when it is first seen: an edit that is saved later does not train here.
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
INSTALLED = {"site-packages", "dist-packages"}  # folders of libraries
# The standard library, the package, and the Hydra plugin that belongs to it.
LIBRARY = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
NOT_OF_USERS = tuple(
    f"{folder}/"
    for folder in (
        *LIBRARY,
        *(folder.resolve() for folder in LIBRARY),
        PACKAGE,
        PACKAGE.parent / "hydra_plugins",
    )
)


@dataclass(frozen=True)
class LoadedFile:
    """A user's file, as this process has loaded it."""

    sha256: str
    words: frozenset[str]  # names and texts in its code, which include the modules it imports


_files: dict[Path, LoadedFile] = {}
_modules: dict[str, Path] = {}  # the user's modules, by the names under which they are imported
_seen: set[str] = {"__main__"}  # names of all modules that `look` has checked


def keep(path: Path, content: bytes) -> None:
    """Record the hash and the words of a user's file, unless it has been recorded before."""
    if path not in _files:
        words = frozenset[str]()
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            words = frozenset(_words_of(compile(content, str(path), "exec")))
        _files[path] = LoadedFile(hashlib.sha256(content).hexdigest(), words)


def look() -> None:
    """Record the user's files that have been imported since the last look."""
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        if name not in _seen:
            _seen.add(name)
            if path := _user_path(name, module):
                _modules[name] = path
                _keep_file(path)


def loaded_files(roots: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of files, and of the files they have imported so far, by path.

    A process that runs several jobs has also loaded files of other jobs. The names in its code
    therefore decide what a file has imported.

    Args:
        roots: Resolved paths of files that have been run.
    """
    look()
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
    """Return the SHA-256 of a file as this process has loaded it. Return None if it has not."""
    return _files[path].sha256 if path in _files else None


def paths_loaded(sha256: str) -> list[Path]:
    """Return the paths from which this process has loaded user's files of this content."""
    return [path for path, file in _files.items() if file.sha256 == sha256]


def script_path() -> Path | None:
    """Return the path of the script that Python was started with, and keep its content."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    _keep_file(path)
    return path


def _keep_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        keep(path, path.read_bytes())


def _user_path(name: str, module: object) -> Path | None:
    """Return the resolved path of a module that is a user's Python file, else None."""
    file = getattr(module, "__dict__", {}).get("__file__")  # run no __getattr__ of lazy modules
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    if name.partition(".")[0] == PACKAGE.name or file.startswith(NOT_OF_USERS):
        return None
    if INSTALLED & {*Path(file).parts}:
        return None
    path = Path(file).resolve()
    return None if str(path).startswith(NOT_OF_USERS) else path


def _words_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names in code, also in functions, and the texts as in import_module("helper")."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _words_of(constant)
        elif isinstance(constant, str):
            yield constant
