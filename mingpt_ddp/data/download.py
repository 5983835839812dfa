"""Read files at fsspec URLs, or download them once into the user's cache."""

import contextlib
import filecmp
import os
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from mingpt_ddp.data.digests import digest_of, status_of
from mingpt_ddp.data.file_kinds import is_hidden
from mingpt_ddp.storage.storage import read_regular

# Fields of a file's metadata that change with its content. In this order, they are used by HTTP, by
# S3 and Azure, by Google Cloud Storage, and by Hugging Face.
VERSION_FIELDS = ("ETag", "etag", "md5Hash", "blob_id")
DOWNLOADS = "downloads"  # name of the cache's directory for downloads
KEPT_NAME_CHARS = 100  # a download's name keeps this many characters from the end of the original


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME/mingpt_ddp, or ~/.cache/mingpt_ddp if the variable is not absolute."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path("~/.cache").expanduser()
    return base / "mingpt_ddp"


def open_filesystem(url: str) -> tuple[Any, str, bool]:
    """Return the filesystem of a URL, the name within it, and whether it is local."""
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        options["client_kwargs"] = {"trust_env": True}  # use the proxies of the environment
    # fsspec would reuse an open archive, although its file may have been replaced since.
    if "::" in url:
        options["skip_instance_cache"] = True
    # fsspec does not know the suffix .tgz.
    if url.startswith("tar://") and url.endswith(".tgz"):
        options["tar"] = {"compression": "gzip"}
    fs, name = fsspec.core.url_to_fs(url, **options)
    is_local = "file" in fs.protocol or "local" in fs.protocol
    return fs, name, is_local


def exists(url: str) -> bool:
    fs, name, _ = open_filesystem(url)
    return bool(fs.exists(name))


def is_remote_glob(url: str) -> bool:
    """Return True if a URL may stand for several files, as s3://bucket/*.txt does."""
    return "://" in url and "*" in url


def download(url: str, cache: Path, sha256: str | None, again: bool) -> tuple[list[Path], bool]:
    """Download the files of a URL into the cache, unless they are already there.

    The name of a download is a digest of its URL and version, then the file's own name. A file that
    changes at its URL therefore gets a new name in the cache.

    Args:
        url: URL or glob of URLs.
        cache: Directory of the cache.
        sha256: Expected SHA-256 of a single file. If the cache has a file with this hash for the
            URL, the network is not used.
        again: Download the files even if the cache has them.

    Returns:
        The local files in the order of their remote names, and True if any of them is new.
    """
    if sha256 and not is_remote_glob(url):
        target = _target(url, url, sha256, cache)
        if target.exists() and not again:
            return [target], False
    fs, name, _ = open_filesystem(url)
    fs.invalidate_cache()
    archive = url.rpartition("::")[2] if "::" in url else ""
    archive_version = _version_of(archive) if archive else None
    targets = {}
    if is_remote_glob(url):
        for remote_name, info in sorted(fs.glob(name, detail=True).items()):
            version = archive_version or _version_in(info)
            if _is_text(remote_name, info):
                targets[remote_name] = version, _target(url, remote_name, version, cache)
    else:
        version = sha256 or archive_version or _version_of(url)
        targets[name] = version, _target(url, url, version, cache)
    is_new = False
    for remote_name, (version, target) in targets.items():
        if version is None or again or not target.exists():
            is_new = _fetch(fs, remote_name, target) or is_new
    return [target for _, target in targets.values()], is_new


def _is_text(name: str, info: dict[str, Any]) -> bool:
    """Return False for directories, hidden files and empty files.

    A symbolic link in a tar archive looks empty, so it is left out too.
    """
    return info["type"] == "file" and info["size"] != 0 and not is_hidden(name)


def _target(url: str, name: str, version: Any, cache: Path) -> Path:
    """Choose the local path of a download.

    It keeps the remote directories and the suffix, which may name the split and the format.
    """
    first = next((part for part in name.split("::") if "://" in part), name)
    parts = PurePosixPath(first.partition("?")[0]).parts
    directories = [part for part in parts[:-1] if part not in ("/", "..")] if name != url else []
    label = f"{digest_of([url, name, version])[:16]}-{parts[-1][-KEPT_NAME_CHARS:]}"
    return Path(cache, DOWNLOADS, *directories, label)


def _version_of(url: str) -> Any:
    """Look up JSON values that change with the content at a URL. Return None if there are none."""
    try:
        fs, name, is_local = open_filesystem(url)
        if is_local:
            return status_of([Path(name)])
        fs.invalidate_cache()
        return _version_in(fs.info(name))
    # The type of the exception depends on the protocol. The download will raise it again.
    except Exception:
        return None


def _version_in(info: dict[str, Any]) -> Any:
    for field in VERSION_FIELDS:
        version = str(info.get(field) or "")
        is_weak = version.startswith("W/")  # such an ETag may stay the same when bytes change
        if version and not is_weak:
            return [field, version]
    return None


def _fetch(fs: Any, name: str, target: Path) -> bool:
    """Download a file atomically. Return False if its bytes have not changed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as folder:
            part = Path(folder) / "download"
            fs.get_file(name, str(part))
            if target.exists() and filecmp.cmp(part, target, shallow=False):
                return False
            os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.removedirs(target.parent)  # deletes only directories that are empty
        raise
    return True


def read_file(url: str, limit: int) -> bytes:
    """Read a file at a URL. A local file must be a regular file.

    Args:
        url: URL or path of the file.
        limit: Largest number of bytes to accept.

    Raises:
        OSError: The file is a pipe or a device, or it has more than `limit` bytes.
        Exception: The protocol of the URL may raise its own types.
    """
    fs, name, is_local = open_filesystem(url)
    if is_local:
        return read_regular(Path(name), limit)
    with fs.open(name, "rb") as file:
        content = bytes(file.read(limit + 1))
    if len(content) > limit:
        raise OSError(f"it has more than {limit:,} bytes")
    return content
