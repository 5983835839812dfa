"""Open the storage at a URL, and check the URLs in a configuration."""

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

# Protocols that need their own class. All others use RemoteStorage.
STORAGE_CLASSES: dict[str, type[RemoteStorage]] = {"s3": S3Storage, "s3a": S3Storage}
# How to install the library for a protocol. For other protocols, the error of fsspec names it.
INSTALL_ADVICE = dict.fromkeys(("s3", "s3a"), "pip install 'mingpt_ddp[s3]'")
READ_ONLY_PROTOCOLS = ("http", "https")
ADVICE = "use a directory or an object store"


def check_can_open(key: str, url: str, writable: bool = False) -> None:
    """Check that an installed library can open a URL. Most protocols send no request for this.

    A URL is refused if its protocol is unknown or not installed, or needs settings besides the URL.

    Args:
        key: The configuration key of the URL.
        writable: Also refuse a protocol that is read-only.

    Raises:
        ConfigError: The URL is refused. The message names `key`.
    """
    has_path = "://" not in url or not url.rstrip("/").endswith(":")
    check(has_path, f"{key}={url} has no path; add one")
    for part in url.split("::"):
        protocol = split_protocol(part)[0] or "file"
        fits = not writable or protocol not in READ_ONLY_PROTOCOLS
        check(fits, f"{key}={url}: {protocol}:// is read-only; {ADVICE}")
        if protocol in READ_ONLY_PROTOCOLS:
            # The library for it is always installed. Do not import it, which takes 0.1 seconds.
            continue
        try:
            fsspec.get_filesystem_class(protocol)
            if "::" not in url:
                with suppress(StorageUnavailableError):  # will be reported when the URL is used
                    open_storage(url, key)
        except ValueError as error:
            raise ConfigError(
                f"{key}={url}: the protocol {protocol}:// is unknown; check its spelling"
            ) from error
        except ImportError as error:
            # The message of fsspec names the package that the protocol needs.
            advice = INSTALL_ADVICE.get(protocol, str(error))
            raise ConfigError(
                f"{key}={url}: the library for {protocol}:// is not installed; {advice}"
            ) from error


def check_urls(config: Config) -> None:
    """Check that installed libraries can open all URLs in a configuration.

    Raises:
        ConfigError: A URL cannot be opened. The message names its key.
    """
    path = getattr(config.data, "path", None)
    if path and not getattr(config.data, "reader", None):
        check_can_open("data.path", path)
    if config.snapshot.path:
        check_can_open("snapshot.path", config.snapshot.path, writable=True)
    check_can_open("run.resume", config.run.resume)
    if config.run.init_from is not None:
        check_can_open("run.init_from", config.run.init_from)


def check_text_exists(config: Config) -> None:
    """Check that the text of data.path exists, if it is a local file.

    This is a quick check before torch is imported. URLs, built-in texts, glob patterns and a user's
    reader are not checked here.

    Raises:
        DataError: The file does not exist. The message names `data.path`.
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
    except (OSError, ValueError):  # will be reported when the text is read
        pass


def open_storage(url: str, key: str = "URL") -> Storage:
    """Open the storage at the path of a directory, or at any URL that fsspec supports.

    Most protocols do not send a request yet.

    Args:
        key: The configuration key of the URL, for error messages.

    Raises:
        ConfigError: The protocol needs settings besides the URL. The message names `key`.
        StorageUnavailableError: The protocol sends a request, and the storage does not respond.
    """
    url = url.rstrip("/") or url
    try:
        # Create a new filesystem object. One that fsspec shares may have old listings in its cache.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except OSError as error:
        raise StorageUnavailableError(redact(f"cannot open {url}: {describe(error)}")) from error
    except (TypeError, AttributeError, ValueError) as error:
        # The filesystem needs parameters, or must be chained to another one.
        raise ConfigError(
            f"{key}={url}: {split_protocol(url)[0]}:// needs more than a URL; {ADVICE}"
        ) from error
    if isinstance(fs, LocalFileSystem):
        return Storage(url, root)
    return STORAGE_CLASSES.get(split_protocol(url)[0], RemoteStorage)(url, root, fs)
