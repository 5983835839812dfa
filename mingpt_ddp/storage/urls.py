"""Open the storage at a URL, and check URLs in a configuration."""

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.remote import RemoteStorage
from mingpt_ddp.storage.s3 import S3Storage
from mingpt_ddp.storage.storage import Storage

S3 = ("s3", "s3a")
READ_ONLY = ("http", "https")


def check_url(url: str, key: str, writable: bool = False) -> None:
    """Refuse a URL whose protocol is unknown or not installed, or, if `writable`, read-only.

    Raises:
        ConfigError: naming `key`, the configuration key that holds the URL.
    """
    for part in url.split("::"):
        protocol = split_protocol(part)[0] or "file"
        if writable and protocol in READ_ONLY:
            raise ConfigError(f"{key}={url}: {protocol}:// is read-only; use a directory or an object store")
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise ConfigError(f"{key}={url}: no such protocol as {protocol}://") from error
        except ImportError as error:
            package = "mingpt_ddp[s3]" if protocol in S3 else f"fsspec[{protocol}]"
            raise ConfigError(f"{key}={url}: {protocol}:// is not installed; pip install '{package}'") from error


def open_storage(url: str) -> Storage:
    """Return the storage at a directory or any fsspec URL; no request is sent yet."""
    url = url.rstrip("/") or url
    # An instance of its own, so that its cache of listings is never older than the last request made here.
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    if isinstance(fs, LocalFileSystem):
        return Storage(url, root)
    return (S3Storage if split_protocol(url)[0] in S3 else RemoteStorage)(url, root, fs)
