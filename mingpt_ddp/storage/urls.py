"""Open the storage at a URL, and check URLs in a configuration."""

import glob
import os
from contextlib import suppress

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import BUILTIN_PREFIX
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import ConfigError, DataError, StorageUnavailableError
from mingpt_ddp.storage.remote.remote import RemoteStorage
from mingpt_ddp.storage.remote.remote_errors import describe, redact
from mingpt_ddp.storage.remote.s3 import S3Storage
from mingpt_ddp.storage.storage import Storage

# The storage of a protocol, if fsspec's filesystem is not enough, and how to install its library.
STORAGES: dict[str, type[RemoteStorage]] = {"s3": S3Storage, "s3a": S3Storage}
INSTALL = dict.fromkeys(("s3", "s3a"), "pip install 'mingpt_ddp[s3]'")
READ_ONLY = ("http", "https")
INSTEAD = "use a directory or an object store"


def check_can_open(key: str, url: str, writable: bool = False) -> None:
    """Refuse a URL whose protocol is unknown, is not installed or needs more than a URL.

    Args:
        key: the configuration key of the URL.
        writable: refuse a protocol that is read-only too.

    Raises:
        ConfigError: names `key`.
    """
    has_path = "://" not in url or not url.rstrip("/").endswith(":")
    check(has_path, f"{key}={url} has no path; add one")
    for part in url.split("::"):
        protocol = split_protocol(part)[0] or "file"
        fits = not writable or protocol not in READ_ONLY
        check(fits, f"{key}={url}: {protocol}:// is read-only; {INSTEAD}")
        if protocol in READ_ONLY:
            continue  # this package requires its library, which takes 0.1 seconds to import
        try:
            fsspec.get_filesystem_class(protocol)
            if "::" not in url:
                with suppress(StorageUnavailableError):  # reported where the URL is used
                    open_storage(url, key)
        except ValueError as error:
            raise ConfigError(f"{key}={url}: no such protocol as {protocol}://") from error
        except ImportError as error:
            # fsspec knows which package each protocol needs
            advice = INSTALL.get(protocol, str(error))
            raise ConfigError(f"{key}={url}: {protocol}:// is not installed; {advice}") from error


def check_urls(config: Config) -> None:
    """Raise a ConfigError for a URL that no installed library can open."""
    path = getattr(config.data, "path", None)
    if path and not getattr(config.data, "reader", None):
        check_can_open("data.path", path)
    if config.snapshot.path:
        check_can_open("snapshot.path", config.snapshot.path, writable=True)
    check_can_open("run.resume", config.run.resume)
    if config.run.init_from is not None:
        check_can_open("run.init_from", config.run.init_from)


def check_text(config: Config) -> None:
    """Refuse a local text that does not exist, before torch is imported.

    Raises:
        DataError: It names `data.path`.
    """
    path = getattr(config.data, "path", None)
    if not path or getattr(config.data, "reader", None):
        return
    if "://" in path or path.startswith(BUILTIN_PREFIX) or glob.has_magic(path):
        return
    try:
        os.stat(fsspec.core.url_to_fs(path)[1])
    except FileNotFoundError as error:
        raise DataError(f"data.path={path}: there is no such file") from error
    except (OSError, ValueError):  # the error is reported where the text is read
        pass


def open_storage(url: str, key: str = "URL") -> Storage:
    """Return the storage at a directory or any fsspec URL; most protocols send no request yet.

    Raises:
        ConfigError: its protocol needs more than a URL; the message names `key`.
        StorageUnavailableError: its protocol sends a request, and the storage does not respond.
    """
    url = url.rstrip("/") or url
    try:
        # A separate instance: its cache of listings is no older than the last request made here.
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
    return STORAGES.get(split_protocol(url)[0], RemoteStorage)(url, root, fs)
