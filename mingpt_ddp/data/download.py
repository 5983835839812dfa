"""Files at fsspec URLs: local ones as they are, others downloaded once into the user's cache."""

import glob
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import fsspec

from mingpt_ddp.data.known_files import FileRecords, Hash, file_status
from mingpt_ddp.storage.storage import read_regular

# Of what a filesystem knows of a file, what changes with its content: HTTP, S3, Azure; Google;
# Hugging Face.
VERSIONS = ("ETag", "etag", "md5Hash", "blob_id")
DOWNLOADS = "downloads"  # in the cache


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME/mingpt_ddp, or ~/.cache/mingpt_ddp if that is no absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path("~/.cache").expanduser()
    return base / "mingpt_ddp"


def open_filesystem(url: str) -> tuple[Any, str, bool]:
    """Return the filesystem of a URL, the name within it, and whether it is local."""
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        options["client_kwargs"] = {"trust_env": True}  # use proxies
    fs, name = fsspec.core.url_to_fs(url, **options)
    is_local = "file" in fs.protocol or "local" in fs.protocol
    return fs, name, is_local


def exists(url: str) -> bool:
    fs, name, _ = open_filesystem(url)
    return bool(fs.exists(name))


def download_path(url: str, cache: Path) -> Path:
    """Return where `download` puts the file of a URL."""
    return cache / DOWNLOADS / hashlib.sha256(url.encode()).hexdigest()[:16]


def version_of(url: str) -> Any:
    """Return JSON values that change with the content at a URL; None: nothing is known to."""
    try:
        fs, name, is_local = open_filesystem(url.rpartition("::")[2])  # of zip://a.txt::URL
        if is_local:
            return file_status([Path(name)])
        fs.invalidate_cache()
        known = fs.info(name)
    except Exception:  # exceptions differ by protocol; the download raises the same
        return None
    for field in VERSIONS:
        version = str(known.get(field) or "")
        if version and not version.startswith("W/"):  # a weak one is not of the bytes
            return [field, version]
    return None


def fetch(
    url: str, target: Path, records: FileRecords, key: Any, hash_file: Callable[[Path], str]
) -> None:
    """Download a file to `target`, atomically, unless its version is there, undamaged.

    Args:
        key: of the record of the version, besides the URL; None: download it in any case.
        hash_file: returns the SHA-256 of the text of a whole download; raises to refuse it.
    """
    record = ["version", url, key]
    version = None if key is None else version_of(url)
    known = records.find(record, version, Hash)
    if known and target.exists() and hash_file(target) == known.sha256:
        return
    fs, name, _ = open_filesystem(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as directory:
        part = Path(directory) / "download"
        fs.get_file(name, str(part))
        content_hash = Hash(hash_file(part))
        os.replace(part, target)
    if version is not None:
        records.add(record, version, version_of(url), content_hash)


def read_file(url: str, limit: int) -> bytes:
    """Read a file at a URL; a local one must be a regular file.

    Raises:
        OSError: it is a pipe or a device, or has more than `limit` bytes; other exceptions differ
            by protocol.
    """
    fs, name, is_local = open_filesystem(url)
    if is_local:
        return read_regular(Path(name), limit)
    with fs.open(name, "rb") as file:
        content = bytes(file.read(limit + 1))
    if len(content) > limit:
        raise OSError(f"it has more than {limit:,} bytes")
    return content


def matches(pattern: str) -> tuple[Path, list[str]]:
    """Return the directory that a glob begins with, and the names that match below it."""
    parts = PurePath(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    return root, glob.glob(os.path.join(*parts[fixed:]), root_dir=root, recursive=True)
