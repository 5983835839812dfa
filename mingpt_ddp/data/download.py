"""Files at fsspec URLs: local ones as they are, others downloaded once into the user's cache."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from mingpt_ddp.storage.storage import read_regular

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


def download(fs: Any, name: str, target: Path, check: Callable[[Path], object]) -> None:
    """Download a file to `target`, atomically.

    Args:
        check: called with the whole download before it replaces `target`; raises to refuse it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as directory:
        part = Path(directory) / "download"
        fs.get_file(name, str(part))
        check(part)
        os.replace(part, target)


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
