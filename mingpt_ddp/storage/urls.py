"""Open the storage at a URL, and check URLs in a configuration."""

from contextlib import suppress

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import ConfigError, StorageUnavailableError
from mingpt_ddp.storage.remote import RemoteStorage, describe, redact
from mingpt_ddp.storage.s3 import S3Storage
from mingpt_ddp.storage.storage import Storage

S3 = ("s3", "s3a")
INSTEAD = "use a directory or an object store"


def check_url(url: str, key: str, writable: bool = False) -> None:
    """Refuse a URL whose protocol is unknown, not installed, needs more than a URL or, if
    `writable`, is read-only.

    Raises:
        ConfigError: names `key`, the configuration key of the URL.
    """
    check(
        "://" not in url or not url.rstrip("/").endswith(":"), f"{key}={url} has no path; add one"
    )
    for part in url.split("::"):
        protocol = split_protocol(part)[0] or "file"
        is_read_only = protocol in ("http", "https")
        check(
            not (writable and is_read_only), f"{key}={url}: {protocol}:// is read-only; {INSTEAD}"
        )
        try:
            fsspec.get_filesystem_class(protocol)
            if "::" not in url:
                with suppress(StorageUnavailableError):  # reported where the URL is used
                    open_storage(url, key)
        except ValueError as error:
            raise ConfigError(f"{key}={url}: no such protocol as {protocol}://") from error
        except ImportError as error:
            package = "mingpt_ddp[s3]" if protocol in S3 else f"fsspec[{protocol}]"
            raise ConfigError(
                f"{key}={url}: {protocol}:// is not installed; pip install '{package}'"
            ) from error


def open_storage(url: str, key: str = "URL") -> Storage:
    """Return the storage at a directory or any fsspec URL; most protocols send no request yet.

    Raises:
        ConfigError: its protocol needs more than a URL; the message names `key`.
        StorageUnavailableError: its protocol sends a request, and the storage does not respond.
    """
    url = url.rstrip("/") or url
    try:
        # A separate instance, so that its listings cache is never older than the last request made
        # here.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except OSError as error:
        raise StorageUnavailableError(redact(f"cannot open {url}: {describe(error)}")) from error
    except (TypeError, AttributeError, ValueError) as error:
        # a filesystem with parameters, or a chained one
        raise ConfigError(
            f"{key}={url}: {split_protocol(url)[0]}:// needs more than a URL; {INSTEAD}"
        ) from error
    if isinstance(fs, LocalFileSystem):
        return Storage(url, root)
    return (S3Storage if split_protocol(url)[0] in S3 else RemoteStorage)(url, root, fs)
