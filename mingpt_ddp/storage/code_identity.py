"""Which code trains: one SHA-256 over its Python files, and what its checkouts have changed.

A record of it, in every state.json and in result.json:

    {"sha256": "3f2a91...", "commits": {"my_project": "0ffcaf...-dirty"}, "patch": "code.patch"}

and `earlier`, the SHA-256 of other code that has trained the run before; in state.json also
`files`, the first digits of that of each file.
"""

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from mingpt_ddp.storage.git import MAX_PATCH_BYTES, git, no_filters
from mingpt_ddp.storage.storage import read_regular

PACKAGE = Path(__file__).resolve().parents[1]
PATCH = "code.patch"
MAX_CODE_BYTES = 1 << 24  # of a file
TOO_LARGE = f"more than {MAX_PATCH_BYTES:,} bytes, not kept"
UNKNOWN = "unknown"
INITIAL = "(initial)"  # git's word for a checkout without a commit
COMMIT = re.compile("^([0-9a-f]{12})[0-9a-f]{28,52}")  # by SHA-1 or SHA-256
GIT_S = 5.0  # for all that git is asked
READ_S = 60.0  # for all that is read, of which a lost disk may be a part
SHOWN = 5  # files that a message names
LONGEST = 400  # characters of a description
KINDS = {"sha256": str, "commits": dict, "files": dict, "earlier": list}  # of a record
STATUS = (
    *("status", "--porcelain=v2", "--branch", "-z"),
    *("--untracked-files=all", "--ignore-submodules=dirty", "--no-renames"),
)
CHANGED = ("1 ", "2 ", "u ")  # how the entries of tracked files begin there
UNTRACKED = "? "
DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color"),
    *("--ignore-submodules=dirty", "--submodule=short", "--src-prefix=a/", "--dst-prefix=b/"),
)
BINARY = re.compile(rb"^Binary files .* differ$", re.MULTILINE)  # git applies no such part
SECRET_NAME = re.compile(
    r"/(\.env|\.netrc|\.pgpass|\.pypirc|id_(rsa|dsa|ecdsa|ed25519))|secret|credential|passw|"
    r"\.(env|pem|key|p12|pfx|kdbx)\b",
    re.IGNORECASE,
)
SECRET = re.compile(  # in a text in lower case, where this is four times as fast
    r"""
    -----begin[ ][a-z ]*private[ ]key
    | ://[^/\s:@"']*:[^/\s@"']+@                                      # user:password@host
    | \b(?:(?:akia|asia)[0-9a-z]{16}|aiza[\w-]{30}|(?:sk|glpat|xox[a-z])-[\w-]{10})
    | https?://[^/\s:@"'{}]{8,}@                                       # token@host
    | \b(?:[sr]k_(?:live|test)_[a-z0-9]{10}|bearer\s+[\w.~+/=-]{16})
    | (?:\bkey["']?\s*[:=]\s*["'][0-9a-f]{40}
      | token["']?\]?\s*[:=]\s*["'][\w.~+/=-]{20,}
      | (?:\b|_)pwd["']?\]?\s*[:=]\s*["'][^"'\s]{6,})["']
    | \b(?:(?:gh[a-z]|hf)_[a-z0-9]{20}|github_pat_\w{20})
    | (?:passw|secret|credential|(?:api|access|auth|private)_?(?:key|token))\w*["']?\]?
      \s*(?::[ ]*[\w.|\[\]][\w.|\[\] ]*=|[:=])\s*                       # with a type, too
      (?:["'][^"'\s]{6,}["']|[^"'\s()\[\]{},]{6,}\s*$)
    """,
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True)
class Code:
    """The code of this process, and the changes in its checkouts."""

    record: dict[str, Any]  # without what depends on the run
    patch: bytes  # empty: there is none, or the record says why

    def record_in(self, directory: Path, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of a run that trains from here on.

        Args:
            directory: of the run; a patch of an earlier start stays.
            before: the record in the snapshot that it resumes from; {}: there is none.
        """
        earlier = [*map(str, before.get("earlier", []))]
        if before and before["sha256"] not in (self.record["sha256"], *earlier):
            earlier.append(before["sha256"])
        record = {**self.record, "earlier": earlier}
        if self.patch:
            record["patch"] = PATCH
            with contextlib.suppress(OSError):
                if read_regular(directory / PATCH, 2 * MAX_PATCH_BYTES) != self.patch:
                    record["patch"] = f"code-{_sha256(self.patch)[:8]}.patch"
        return record


def start_reading(chosen: Mapping[str, Path]) -> Callable[[], Code]:
    """Call `read_code` on a thread, during the rest of a start.

    The returned function waits for it, for at most READ_S seconds.
    """
    found: list[Code] = []

    def read() -> None:
        try:
            found.append(read_code(chosen))
        except Exception as error:  # of a user's files: it ends no run
            found.append(_unknown(repr(error)))

    def wait() -> Code:
        if not found:
            thread.join(READ_S)
        if not found:
            found.append(_unknown(f"reading it takes more than {READ_S:g} s"))
        return found[0]

    thread = threading.Thread(target=read, name="code", daemon=True)
    thread.start()
    return wait


def _unknown(why: str) -> Code:
    """Return the code where it cannot be read."""
    patch = f"{UNKNOWN}: {why}"[:LONGEST]  # one line
    return Code({"sha256": UNKNOWN, "commits": {}, "patch": patch, "files": {}}, b"")


def read_code(chosen: Mapping[str, Path], package: Path | None = None) -> Code:
    """Return the code of the package and of a user's files.

    Args:
        chosen: the files that the configuration names, by group.
        package: of another checkout; None: that of this process.
    """
    package = package or PACKAGE
    files = dict(_package_files(package))
    folders = [package]
    for group, path in chosen.items():
        path = path.resolve()
        folders.append(path.parent)
        for name, sha256 in _user_files(path).items():
            files[f"{group}/{name}"] = sha256
    commits = {}
    patch = b""
    lost = None
    for root in filter(None, dict.fromkeys(map(root_of, folders))):
        name = str(root) if root.name in commits else root.name
        try:
            checkout = read_checkout(root, name)
            commits[name] = checkout.commit
            patch += checkout.patch
            lost = lost or checkout.lost
        except subprocess.TimeoutExpired:
            commits[name] = f"{UNKNOWN}: git took more than {GIT_S:g} s"
        except (OSError, subprocess.CalledProcessError):
            pass  # without git, or with another user's checkout
    record = {
        "sha256": _sha256(json.dumps(files, sort_keys=True).encode()),
        "commits": commits,
        "patch": lost,
        "files": {name: sha256[:8] for name, sha256 in files.items()},
    }
    return Code(record, b"" if lost else patch)


def forget_files() -> None:
    """Let `read_code` see what has changed since this process has read it."""
    _package_files.cache_clear()
    _user_files.cache_clear()


def recorded_code(values: Any) -> dict[str, Any]:
    """Return the record of the code in an untrusted state.json or result.json; {}: it has none."""
    code = values.get("code") if isinstance(values, dict) else None
    if not isinstance(code, dict) or not code.get("sha256"):
        return {}
    has_types = all(isinstance(code.get(key, kind()), kind) for key, kind in KINDS.items())
    return code if has_types else {}


def describe(code: Mapping[str, Any]) -> str:
    """Return `3f2a91bc4d5e, my_project at 0ffcafa12345-dirty, code.patch`.

    A checkout that is named by its commit is not named twice.
    """
    words = [str(code["sha256"])[:12]]
    for name, commit in code.get("commits", {}).items():
        short = COMMIT.sub(r"\1", str(commit))
        words.append(short if commit == name else f"{name} at {short}")
    if code.get("patch"):
        words.append(str(code["patch"]))
    return " ".join(", ".join(words).split())[:LONGEST]


def difference_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which files differ between two records; "" if none does, or a record is {}."""
    if not before or not now or before["sha256"] == now["sha256"]:
        return ""
    old = before.get("files", {})
    new = now.get("files", {})
    if UNKNOWN in (before["sha256"], now["sha256"]):
        return "which files is unknown"
    names = sorted(name for name in old | new if old.get(name) != new.get(name))
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([name[:100] for name in names[:SHOWN]] + more)


def edited_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the user's files of a record with content that an earlier one, if any, lacks."""
    known = set(before.get("files", {}).values())  # also under another name
    if not known:
        return []
    package = f"{PACKAGE.name}/"
    files = now.get("files", {}).items()
    return [name for name, sha in files if sha not in known and not name.startswith(package)]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _package_files(package: Path) -> dict[str, str]:
    """Return the SHA-256 of each Python file of a package by name, as this process has it."""
    hashes = {}
    for name in glob("**/*.py", root_dir=package, recursive=True):  # follows the link to conf/
        with contextlib.suppress(OSError):  # it is being replaced
            hashes[f"{package.name}/{name}"] = _sha256((package / name).read_bytes())
    return hashes


@functools.cache
def _user_files(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a user's file, and of what it imports from next to it, by name."""
    folder = path.parent
    left = [path]
    hashes: dict[str, str] = {}
    while left:
        file = left.pop()
        name = file.relative_to(folder).as_posix()
        if name in hashes or name.startswith(f"{PACKAGE.name}/"):
            continue
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            content = read_regular(file, MAX_CODE_BYTES)
            hashes[name] = _sha256(content)
            left += _imported(ast.parse(content), file, folder)
    return hashes


def _imported(tree: ast.Module, file: Path, folder: Path) -> Iterator[Path]:
    """Yield where the modules below a folder may be that a file imports, also in functions."""
    for node in ast.walk(tree):
        base = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
            if node.level > len(file.parents):  # above the root directory
                continue
            base = file.parents[node.level - 1] if node.level else folder
        else:
            continue
        if not base.is_relative_to(folder):
            continue
        for name in names:
            stem = base
            for part in name.split("."):
                stem /= part
                yield from (stem.with_suffix(".py"), stem / "__init__.py")


def root_of(folder: Path) -> Path | None:
    """Return the checkout that holds a folder; None: it is in none, or installed."""
    if {"site-packages", "dist-packages"} & {*folder.parts}:
        return None
    return next((path for path in (folder, *folder.parents) if os.path.exists(path / ".git")), None)


@dataclass(frozen=True)
class Checkout:
    """The commit of a checkout, and the patch from there to its files."""

    commit: str
    patch: bytes = b""
    lost: str | None = None  # why the patch is not kept


def read_checkout(root: Path, called: str) -> Checkout:
    """Return what git says of a checkout.

    Raises:
        As of `git`, which may refuse the checkout of another user.
    """
    deadline = time.monotonic() + GIT_S
    ask = functools.partial(git, root, deadline)
    filters = no_filters(root, deadline)
    entries = os.fsdecode(ask(*filters, *STATUS)).split("\0")
    commit = entries[0].removeprefix("# branch.oid ")
    has_changes = any(entry.startswith(CHANGED) for entry in entries)
    new = [entry for entry in entries if entry.startswith(UNTRACKED) and entry.endswith(".py")]
    if not has_changes and not new:
        return Checkout(commit)
    commit_and_changes = f"{commit}-dirty"
    diff = functools.partial(ask, *filters, *DIFF)
    patch = b""
    try:
        if has_changes:
            base = "HEAD"
            if commit == INITIAL:
                base = ask("hash-object", "-t", "tree", "--stdin").decode().strip()  # of no files
            patch = diff(base, "--")
        for entry in new:
            patch += diff("--no-index", "--", os.devnull, entry.removeprefix(UNTRACKED))
    except subprocess.TimeoutExpired:
        return Checkout(commit_and_changes, lost=f"git took more than {GIT_S:g} s, not kept")
    if len(patch) > MAX_PATCH_BYTES:
        return Checkout(commit_and_changes, lost=TOO_LARGE)
    if not patch:
        return Checkout(commit)
    return Checkout(commit_and_changes, _kept(patch, f"# {called!a}, changes since {commit}\n"))


def _kept(patch: bytes, title: str) -> bytes:
    """Return a patch that git applies, byte by byte, without what may hold a secret."""
    kept = title.encode()
    for part in re.split(b"^(?=diff --git )", patch, flags=re.MULTILINE):
        text = part.decode(errors="replace")
        name = text.partition("\n")[0]
        if SECRET_NAME.search(name) or SECRET.search(text.lower()):
            kept += f"# not here, as it may hold a secret: {name}\n".encode()
        elif BINARY.search(part):
            kept += f"# not here, as it is binary or large: {name}\n".encode()
        else:
            kept += part
    return kept
