"""Identify the code that trains: the user's loaded files, the package, and their checkouts.

Every state.json and result.json has this record:

    {"files": {"recipe/mine.py": "3f2a91..."},
     "package": {"sha256": "91bc4d...", "commit": "0ffcaf..."},
     "commits": {"my_project": "5d1e07...-dirty"}, "patch": "code.patch", "earlier": []}

The paths of the user's files are relative to the working directory. `earlier` identifies other
versions of the user's files that have trained the run before.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from mingpt_ddp.config.loaded_code import (
    INSTALLED,
    PACKAGE,
    loaded_files,
    loaded_sha256,
    paths_loaded,
)
from mingpt_ddp.storage.git import MAX_PATCH_BYTES, git, no_filters
from mingpt_ddp.storage.storage import read_regular

PATCH = "code.patch"
MAX_CODE_BYTES = 1 << 24  # size of a Python file
TOO_LARGE = f"more than {MAX_PATCH_BYTES:,} bytes, not kept"
COMMIT = re.compile("^([0-9a-f]{12})[0-9a-f]{28,52}")  # a SHA-1 or SHA-256 hash
GIT_TIMEOUT_S = 5.0  # time limit in seconds for all commands of git together
READ_TIMEOUT_S = 60.0  # time limit in seconds for reading the code
SHOWN = 5  # number of files that a message names
LONGEST = 400  # characters of a description
DIFF = (
    "diff",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--ignore-submodules=dirty",
    "--submodule=short",
    "HEAD",
    "--",
)
# The part of a patch for a binary file, which git cannot apply.
BINARY = re.compile(rb"^Binary files .* differ$", re.MULTILINE)
SECRET_NAME = re.compile(
    r"/(\.env|[._]netrc|\.npmrc|\.pgpass|\.pypirc|\.(aws|kube|ssh)/)|id_(rsa|dsa|ecdsa|ed25519)|"
    r"secret|credential|passw|(api|private)_?key|service[-_]account|kubeconfig|hf_token|"
    r"[/_-]token\.(txt|json)|\.(env|pem|key|p12|pfx|kdbx|jks|ppk|tfvars)(\s|\"|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Code:
    """The code of this process or of a version, and the changes in its checkouts."""

    record: dict[str, Any]  # without `earlier`, which depends on the run
    patch: bytes  # b"" if nothing has changed, or if the record says why it is not kept

    def record_in(self, directory: Path, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of a run that trains from here on.

        Args:
            directory: The run directory. The patch of an earlier start stays there.
            before: The record in the snapshot that the run resumes from, or {}.
        """
        record = {**self.record, "earlier": []}
        if before:
            record["earlier"] = [*map(str, before.get("earlier", []))]
            changed = changed_files(before)
            was = user_code(before)
            if changed and was not in record["earlier"]:
                record["earlier"].append(was)
            # A file that an earlier attempt has imported late may not be loaded yet.
            same = {name: sha for name, sha in before["files"].items() if name not in changed}
            record["files"] = {**same, **record["files"]}
        if self.patch:
            record["patch"] = PATCH
            with contextlib.suppress(OSError):
                if read_regular(directory / PATCH, 2 * MAX_PATCH_BYTES) != self.patch:
                    record["patch"] = f"code-{_sha256(self.patch)[:8]}.patch"
        return record


def start_reading(roots: Iterable[Path]) -> Callable[[], Code]:
    """Read the code of this process on a thread, during the rest of a start.

    Args:
        roots: The user's files that the run begins with.

    Returns:
        A function that waits for the thread, at most READ_TIMEOUT_S: a disk may be lost.
    """
    pool = ThreadPoolExecutor(1, "code")
    reading = pool.submit(lambda: read_code(_by_name(loaded_files(roots))))
    pool.shutdown(wait=False)

    def wait() -> Code:
        try:
            return reading.result(READ_TIMEOUT_S)
        except TimeoutError:
            lost = f"unknown: reading the code takes more than {READ_TIMEOUT_S:g} s"
            package = {"sha256": "unknown", "commit": None}
            return Code({"files": {}, "package": package, "commits": {}, "patch": lost}, b"")

    return wait


def read_code(
    files: Mapping[str, str],
    folders: Iterable[Path] | None = None,
    package: Path | None = None,
) -> Code:
    """Add commits and uncommitted changes to the user's files and the package.

    Args:
        files: The SHA-256 of the user's files, by path.
        folders: The folders of these files. None if their paths tell them.
        package: The package in another checkout. None for the package of this process.
    """
    if folders is None:
        folders = [Path(name).resolve().parent for name in files]
    of_package = root_of(package or PACKAGE)
    commits: dict[str, str] = {}
    package_commit = None
    patch = b""
    lost = None
    for root in filter(None, dict.fromkeys([of_package, *map(root_of, folders)])):
        name = str(root) if root.name in commits else root.name
        try:
            checkout = read_checkout(root, name)
        except (OSError, subprocess.SubprocessError):
            continue  # there is no git, it is slow, or the checkout belongs to another user
        if root == of_package:
            package_commit = checkout.commit
        else:
            commits[name] = checkout.commit
        patch += checkout.patch
        lost = lost or checkout.lost
    sha256 = hash_package(package) if package else _loaded_package()
    record = {
        "files": {**files},
        "package": {"sha256": sha256, "commit": package_commit},
        "commits": commits,
        "patch": lost,
    }
    return Code(record, b"" if lost else patch)


def with_loaded_files(record: Mapping[str, Any], roots: Iterable[Path]) -> dict[str, Any]:
    """Update the record of a run of this process with the files that are loaded by now."""
    if not record:
        return {}
    return {**record, "files": {**record["files"], **_by_name(loaded_files(roots))}}


def recorded_code(values: Any) -> dict[str, Any]:
    """Return the record of the code in an untrusted state.json or result.json, or {}."""
    code = values.get("code") if isinstance(values, dict) else None
    if not isinstance(code, dict):
        return {}
    files = code.get("files")
    package = code.get("package")
    is_record = isinstance(files, dict) and all(isinstance(each, str) for each in files.values())
    has_package = isinstance(package, dict) and isinstance(package.get("sha256"), str)
    has_commits = isinstance(code.get("commits", {}), dict)
    has_earlier = isinstance(code.get("earlier", []), list)
    return code if is_record and has_package and has_commits and has_earlier else {}


def describe(code: Mapping[str, Any]) -> str:
    """Return `mine.py (3f2a91bc), mingpt_ddp at 0ffcaf, my_project at 5d1e07-dirty, code.patch`."""
    words = []
    if code["files"]:
        words.append(f"{_listed(code['files'])} ({user_code(code)})")
    words.append(f"{PACKAGE.name} at {package_of(code)}")
    for name, commit in code.get("commits", {}).items():
        words.append(f"{name} at {_short(commit)}")
    if code.get("patch"):
        words.append(str(code["patch"]))
    return " ".join(", ".join(words).split())[:LONGEST]


def user_code(code: Mapping[str, Any]) -> str:
    """Return digits that identify the content of the user's files in a record, or "" if none."""
    files = code.get("files")
    return _sha256(json.dumps(sorted(files.values())).encode())[:8] if files else ""


def package_of(code: Mapping[str, Any]) -> str:
    """Return the commit of the package in a record, or its SHA-256 if it is in no checkout."""
    package = code["package"]
    return _short(package.get("commit") or package["sha256"][:12])


def changed_files(code: Mapping[str, Any], now: Mapping[str, str] | None = None) -> list[str]:
    """List the user's files in an untrusted record whose content has changed.

    A file that this process has loaded counts with the content that was loaded. Any other file is
    hashed, and not imported. A missing file has changed.

    Args:
        now: The files in a current record. A file that was only renamed has not changed.
    """
    same = {*(now or {}).values()}
    files = code.get("files", {})
    # From another working directory, a file is found by its place beside a file that is loaded.
    folders = {
        (os.path.dirname(name), path.parent)
        for name, sha256 in files.items()
        for path in paths_loaded(sha256)
    }
    changed = []
    for name, sha256 in files.items():
        if sha256 in same or paths_loaded(sha256):
            continue
        paths = [name, *(str(to / os.path.relpath(name, folder)) for folder, to in folders)]
        if all(_sha256_now(path) != sha256 for path in paths):
            changed.append(name)
    return changed


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name the user's files, and the package, that differ between two records. "" if none do."""
    if not before or not now:
        return ""
    words = []
    if changed := changed_files(before, now["files"]):
        words.append(_listed(changed))
    if before["package"]["sha256"] != now["package"]["sha256"]:
        words.append(f"{PACKAGE.name} at {package_of(now)} instead of {package_of(before)}")
    return ", ".join(words)[:LONGEST]


def _by_name(files: Mapping[Path, str]) -> dict[str, str]:
    return {os.path.relpath(path): sha256 for path, sha256 in sorted(files.items())}


def _listed(names: Iterable[str]) -> str:
    names = [name[:100] for name in names]
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join(names[:SHOWN] + more)


def _short(commit: Any) -> str:
    return COMMIT.sub(r"\1", str(commit))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256_now(name: str) -> str | None:
    if not name.endswith(".py"):
        return None
    with contextlib.suppress(OSError, ValueError):
        path = Path(name).resolve()
        return loaded_sha256(path) or hash_file(path)
    return None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a Python file.

    Raises:
        OSError: It cannot be read, or it is too large.
    """
    return _sha256(read_regular(path, MAX_CODE_BYTES))


@functools.cache
def _loaded_package() -> str:
    """Return the SHA-256 of the package as this process has it: it is read once."""
    return hash_package(PACKAGE)


def hash_package(package: Path) -> str:
    """Return one SHA-256 of all Python files of a package."""
    hashes = {}
    # This includes conf, which may be a link.
    for name in sorted(glob("**/*.py", root_dir=package, recursive=True)):
        with contextlib.suppress(OSError):  # the file is being replaced
            hashes[name] = hash_file(package / name)
    return _sha256(json.dumps(hashes).encode())


def root_of(folder: Path) -> Path | None:
    """Return the checkout that holds a folder. Return None if it is in none, or installed."""
    if INSTALLED & {*folder.parts}:
        return None
    return next((path for path in (folder, *folder.parents) if os.path.exists(path / ".git")), None)


@dataclass(frozen=True)
class Checkout:
    """The commit of a checkout, and the patch from there to its files."""

    commit: str  # with -dirty if tracked files have changed
    patch: bytes = b""
    lost: str | None = None  # why the patch is not kept


def read_checkout(root: Path, called: str) -> Checkout:
    """Ask git for the commit of a checkout, and for the changes of its tracked files.

    Raises:
        OSError, SubprocessError: As `git`, which may refuse the checkout of another user. There
            may also be no commit yet.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_S
    commit = git(root, deadline, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    if not commit:
        raise subprocess.SubprocessError(f"{root} has no commit")
    try:
        patch = git(root, deadline, *no_filters(root, deadline), *DIFF)
    except subprocess.TimeoutExpired:
        return Checkout(commit, lost=f"git took more than {GIT_TIMEOUT_S:g} s, not kept")
    if not patch:
        return Checkout(commit)
    if len(patch) > MAX_PATCH_BYTES:
        return Checkout(f"{commit}-dirty", lost=TOO_LARGE)
    title = f"# {called!a}, changes since {commit}\n"
    return Checkout(f"{commit}-dirty", title.encode() + _without_secrets(patch))


def _without_secrets(patch: bytes) -> bytes:
    """Return a patch that git applies, without files whose names mark secrets, or binary ones."""
    kept = b""
    for part in re.split(b"^(?=diff --git )", patch, flags=re.MULTILINE):
        name = part.partition(b"\n")[0]
        if SECRET_NAME.search(name.decode(errors="replace")):
            kept += b"# not here, as its name marks a secret: " + name + b"\n"
        elif BINARY.search(part):
            kept += b"# not here, as it is binary or large: " + name + b"\n"
        else:
            kept += part
    return kept
