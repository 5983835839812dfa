"""Identify the code that trains a run: the user's loaded files, this package, and their checkouts.

A checkout is a working directory of git. Every state.json and result.json has this record:

    {"files": {"recipe/mine.py": "3f2a91..."},
     "package": {"sha256": "91bc4d...", "commit": "0ffcaf..."},
     "commits": {"my_project": "5d1e07...-dirty"}, "patch": "code.patch", "earlier": []}

`files` has the SHA-256 of each of the user's files. Their paths are relative to the working
directory. `commits` has the commit of each checkout, and `patch` names the file with uncommitted
changes. `earlier` lists other versions of the user's files that have trained the run before.
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
MAX_CODE_BYTES = 1 << 24
TOO_LARGE = f"uncommitted changes of more than {MAX_PATCH_BYTES:,} bytes, which were not kept"
COMMIT = re.compile("^([0-9a-f]{12})[0-9a-f]{28,52}")  # the hash is SHA-1 or SHA-256
GIT_TIMEOUT_S = 5.0  # time limit in seconds for all git commands in a checkout together
READ_TIMEOUT_S = 60.0  # time limit in seconds for reading the code
MAX_NAMED_FILES = 5  # a message names at most this many files
MAX_DESCRIPTION_CHARS = 400
DIFF_COMMAND = (
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
# The line that a patch has instead of the changes in a binary file. git cannot apply it.
BINARY_DIFF = re.compile(rb"^Binary files .* differ$", re.MULTILINE)
SECRET_NAME = re.compile(
    r"/(\.env|[._]netrc|\.npmrc|\.pgpass|\.pypirc|\.(aws|kube|ssh)/)|id_(rsa|dsa|ecdsa|ed25519)|"
    r"secret|credential|passw|(api|private)_?key|service[-_]account|kubeconfig|hf_token|"
    r"[/_-]token\.(txt|json)|\.(env|pem|key|p12|pfx|kdbx|jks|ppk|tfvars)(\s|\"|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Code:
    """The code of this process or of another version, with the uncommitted changes in it."""

    record: dict[str, Any]  # the record without `earlier`, which depends on the run
    # The uncommitted changes. b"" if there are none, or if the record says why they are not kept.
    patch: bytes

    def record_in(self, directory: Path, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of the code for a run that this code trains from now on.

        Args:
            directory: The run directory. If it has the patch of an earlier start with other
                changes, the new patch gets another name.
            before: The record in the snapshot that the run resumes from. {} at the first start.
        """
        record = {**self.record, "earlier": []}
        if before:
            record["earlier"] = [*map(str, before.get("earlier", []))]
            changed = changed_files(before)
            digest_before = user_code_digest(before)
            if changed and digest_before not in record["earlier"]:
                record["earlier"].append(digest_before)
            # Keep the unchanged files of earlier starts. A file that is imported late may not be
            # loaded yet in this start.
            same = {name: sha for name, sha in before["files"].items() if name not in changed}
            record["files"] = {**same, **record["files"]}
        if self.patch:
            record["patch"] = PATCH
            with contextlib.suppress(OSError):
                if read_regular(directory / PATCH, 2 * MAX_PATCH_BYTES) != self.patch:
                    record["patch"] = f"code-{_sha256(self.patch)[:8]}.patch"
        return record


def start_reading(roots: Iterable[Path]) -> Callable[[], Code]:
    """Start a thread that reads the code of this process. The start of the run goes on meanwhile.

    Args:
        roots: The user's files from which all other files of the user are imported.

    Returns:
        A function that waits for the code and returns it. It waits at most READ_TIMEOUT_S, because
        a disk may have stopped responding.
    """
    pool = ThreadPoolExecutor(1, "code")
    reading = pool.submit(lambda: read_code(_by_name(loaded_files(roots))))
    pool.shutdown(wait=False)

    def wait() -> Code:
        try:
            return reading.result(READ_TIMEOUT_S)
        except TimeoutError:
            why = f"unknown: reading the code takes more than {READ_TIMEOUT_S:g} s"
            package = {"sha256": "unknown", "commit": None}
            return Code({"files": {}, "package": package, "commits": {}, "patch": why}, b"")

    return wait


def read_code(
    files: Mapping[str, str],
    folders: Iterable[Path] | None = None,
    package: Path | None = None,
) -> Code:
    """Identify the user's files and the package, with their commits and uncommitted changes.

    Args:
        files: The SHA-256 of the user's files, by path.
        folders: The folders that hold these files. By default, the parent directories of
            `files`.
        package: The directory of the package in another checkout. By default, the package of this
            process.
    """
    if folders is None:
        folders = [Path(name).resolve().parent for name in files]
    package_root = root_of(package or PACKAGE)
    commits: dict[str, str] = {}
    package_commit = None
    patch = b""
    why_no_patch = None
    for root in filter(None, dict.fromkeys([package_root, *map(root_of, folders)])):
        name = str(root) if root.name in commits else root.name
        try:
            checkout = read_checkout(root, name)
        except (OSError, subprocess.SubprocessError):
            continue  # git is missing or slow, or the checkout belongs to another user
        if root == package_root:
            package_commit = checkout.commit
        else:
            commits[name] = checkout.commit
        patch += checkout.patch
        why_no_patch = why_no_patch or checkout.why_no_patch
    sha256 = hash_package(package) if package else _loaded_package()
    record = {
        "files": {**files},
        "package": {"sha256": sha256, "commit": package_commit},
        "commits": commits,
        "patch": why_no_patch,
    }
    return Code(record, b"" if why_no_patch else patch)


def with_loaded_files(record: Mapping[str, Any], roots: Iterable[Path]) -> dict[str, Any]:
    """Add all the user's files that this process has loaded by now to the record of its run."""
    if not record:
        return {}
    return {**record, "files": {**record["files"], **_by_name(loaded_files(roots))}}


def recorded_code(values: Any) -> dict[str, Any]:
    """Return the record of the code in an untrusted state.json or result.json.

    Return {} if there is no valid record.
    """
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
    """Describe the code in a record in one line.

    For example: `mine.py (3f2a91bc), mingpt_ddp at 0ffcaf, my_project at 5d1e07-dirty, code.patch`.
    """
    words = []
    if code["files"]:
        words.append(f"{_join_names(code['files'])} ({user_code_digest(code)})")
    words.append(f"{PACKAGE.name} at {package_version(code)}")
    for name, commit in code.get("commits", {}).items():
        words.append(f"{name} at {_short(commit)}")
    if code.get("patch"):
        words.append(str(code["patch"]))
    return " ".join(", ".join(words).split())[:MAX_DESCRIPTION_CHARS]


def user_code_digest(code: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that identify the content of the user's files in a record.

    Return "" if there are no files.
    """
    files = code.get("files")
    return _sha256(json.dumps(sorted(files.values())).encode())[:8] if files else ""


def package_version(code: Mapping[str, Any]) -> str:
    """Return the short hash of the package's commit in a record.

    If the package was not in a checkout, return the start of its SHA-256.
    """
    package = code["package"]
    return _short(package.get("commit") or package["sha256"][:12])


def changed_files(code: Mapping[str, Any], now: Mapping[str, str] | None = None) -> list[str]:
    """List the user's files in an untrusted record whose content has changed since it was recorded.

    If this process has loaded a file, its content at that time counts. Any other file is hashed,
    but not imported. A file that is missing has changed.

    Args:
        code: The earlier record.
        now: The files in a current record, if there is one. A file whose content is among them has
            only been renamed, and has not changed.
    """
    same = {*(now or {}).values()}
    files = code.get("files", {})
    # The recorded paths are relative to the working directory, which may be a different one now. If
    # one of the recorded files is loaded, also look for the others at their places relative to it.
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
    """Name the files of the user that differ between two records, and the package if it differs.

    Return "" if nothing differs.
    """
    if not before or not now:
        return ""
    words = []
    if changed := changed_files(before, now["files"]):
        words.append(_join_names(changed))
    if before["package"]["sha256"] != now["package"]["sha256"]:
        words.append(
            f"{PACKAGE.name} at {package_version(now)} instead of {package_version(before)}"
        )
    return ", ".join(words)[:MAX_DESCRIPTION_CHARS]


def _by_name(files: Mapping[Path, str]) -> dict[str, str]:
    """Return the hashes of files by their paths relative to the working directory."""
    return {os.path.relpath(path): sha256 for path, sha256 in sorted(files.items())}


def _join_names(names: Iterable[str]) -> str:
    """Join file names for a message. Name at most MAX_NAMED_FILES, and count the others."""
    names = [name[:100] for name in names]
    more = [f"{len(names) - MAX_NAMED_FILES} more"] if len(names) > MAX_NAMED_FILES else []
    return ", ".join(names[:MAX_NAMED_FILES] + more)


def _short(commit: Any) -> str:
    """Shorten the hash of a commit to 12 digits. Keep -dirty after it."""
    return COMMIT.sub(r"\1", str(commit))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256_now(name: str) -> str | None:
    """Return the SHA-256 of a Python file: of the loaded content, if this process has loaded it.

    Return None if the file is not a Python file, or cannot be read.
    """
    if not name.endswith(".py"):
        return None
    with contextlib.suppress(OSError, ValueError):
        path = Path(name).resolve()
        return loaded_sha256(path) or hash_file(path)
    return None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a Python file.

    Raises:
        OSError: The file cannot be read, or is larger than MAX_CODE_BYTES.
    """
    return _sha256(read_regular(path, MAX_CODE_BYTES))


@functools.cache
def _loaded_package() -> str:
    """Return the SHA-256 of the package that this process runs. It is computed only once."""
    return hash_package(PACKAGE)


def hash_package(package: Path) -> str:
    """Return one SHA-256 of all Python files in a package."""
    hashes = {}
    # glob follows a symbolic link. The folder conf may be one.
    for name in sorted(glob("**/*.py", root_dir=package, recursive=True)):
        with contextlib.suppress(OSError):  # the file is being replaced
            hashes[name] = hash_file(package / name)
    return _sha256(json.dumps(hashes).encode())


def root_of(folder: Path) -> Path | None:
    """Return the root of the checkout that contains a folder.

    Return None if there is no checkout, or if the folder belongs to an installed package.
    """
    if INSTALLED & {*folder.parts}:
        return None
    return next((path for path in (folder, *folder.parents) if os.path.exists(path / ".git")), None)


@dataclass(frozen=True)
class Checkout:
    """The commit of a checkout, and the uncommitted changes in it."""

    commit: str  # hash of the commit, with -dirty if tracked files have changed since
    patch: bytes = b""
    why_no_patch: str | None = None  # the reason if there are changes, but the patch is not kept


def read_checkout(root: Path, name: str) -> Checkout:
    """Ask git for the commit of a checkout, and for the uncommitted changes of its tracked files.

    Args:
        root: The root of the checkout.
        name: Name of the checkout in the patch.

    Raises:
        OSError, SubprocessError: git is missing or fails, the checkout belongs to another user, or
            it does not have a commit yet.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_S
    commit = git(root, deadline, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    if not commit:
        raise subprocess.SubprocessError(f"{root} has no commit")
    try:
        patch = git(root, deadline, *no_filters(root, deadline), *DIFF_COMMAND)
    except subprocess.TimeoutExpired:
        why = f"uncommitted changes unknown: git took more than {GIT_TIMEOUT_S:g} s"
        return Checkout(commit, why_no_patch=why)
    if not patch:
        return Checkout(commit)
    if len(patch) > MAX_PATCH_BYTES:
        return Checkout(f"{commit}-dirty", why_no_patch=TOO_LARGE)
    title = f"# {name!a}, changes since {commit}\n"
    return Checkout(f"{commit}-dirty", title.encode() + _without_secrets(patch))


def _without_secrets(patch: bytes) -> bytes:
    """Remove binary files from a patch, and files whose names suggest that they hold secrets.

    git can still apply the patch.
    """
    kept = b""
    for part in re.split(b"^(?=diff --git )", patch, flags=re.MULTILINE):
        name = part.partition(b"\n")[0]
        if SECRET_NAME.search(name.decode(errors="replace")):
            kept += b"# left out, because the name suggests a secret: " + name + b"\n"
        elif BINARY_DIFF.search(part):
            kept += b"# left out, because the file is binary or large: " + name + b"\n"
        else:
            kept += part
    return kept
