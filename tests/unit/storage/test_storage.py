"""A storage keeps files by name below one URL, on a local disk or in memory.

Local files are written atomically.
"""

from __future__ import annotations

import array
import errno
import os
import sys
import time
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, register_implementation

from mingpt_ddp.errors import ConfigError, StorageUnavailableError
from mingpt_ddp.storage import storage as local
from mingpt_ddp.storage.remote import remote
from mingpt_ddp.storage.remote.remote_errors import StorageError, redact
from mingpt_ddp.storage.storage import atomic_write
from mingpt_ddp.storage.urls import check_can_open, open_storage


@pytest.fixture
def remote_storage():
    return open_storage(f"memory://{uuid.uuid4().hex}/store")


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path, remote_storage):
    return open_storage(f"file://{tmp_path}/store") if request.param == "local" else remote_storage


CONTENTS = {
    "bytes": b"some bytes",
    "bytearray": bytearray(b"some bytes"),
    "memoryview": memoryview(b"some bytes"),
    "wider items": memoryview(array.array("d", [1.0, 2.0])),
    "empty": b"",
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_write_and_read(kind, storage, remote_storage):
    content = CONTENTS[kind]
    expected = bytes(content)
    storage.write("a/b/file", b"a longer content from before")
    storage.write("a/b/file", content)
    assert storage.size("a/b/file") == len(expected)
    assert [storage.read("a/b/file", limit) for limit in (None, 4, 99)] == [
        expected,
        expected[:4],
        expected,
    ]
    assert open_storage(f"{storage.url}/a/b/").list() == ["file"], "no partial file"
    assert remote_storage.put_if_absent("new", content)
    assert remote_storage.read("new") == expected


def test_the_chunks_make_up_the_file(storage):
    """Each chunk fits in memory, and an empty file has no chunk."""
    chunk = local.CHUNK_BYTES if storage.has_flock else remote.CONCURRENT_PARTS * remote.PART_BYTES
    content = bytes(range(251)) * (chunk // 251 + 9)
    storage.write("file", content)
    parts = [*storage.chunks("file", len(content))]
    assert [*map(len, parts)] == [chunk, len(content) - chunk]
    is_same = b"".join(parts) == content
    assert is_same
    assert b"".join(storage.chunks("file", 1000, start=chunk)) == content[chunk:][:1000]
    assert [*storage.chunks("file", 0)] == []


def test_only_remote_storage_is_shared_with_other_machines(storage):
    assert not storage.shared
    assert not open_storage("simplecache::memory://x").shared
    assert open_storage("http://127.0.0.1:1/x").shared


def test_a_tree_of_files(storage):
    """A listing has the sorted names of one level, including files of other processes."""
    other = open_storage(f"{storage.url}/")
    assert storage.list() == []
    for name in ("b/2", "a/1", "c", "b/1"):
        other.write(name, b"x")
        assert storage.read(name) == b"x"
    assert storage.list() == ["a", "b", "c"]
    assert open_storage(f"{storage.url}/b").list() == ["1", "2"]
    assert storage.size("a") is None, "a directory is not a file"
    assert open_storage(f"{storage.url}/a/1").list() == []
    other.delete("b/1")
    assert open_storage(f"{storage.url}/b").list() == ["2"]
    for _ in range(2):  # the second time, it no longer exists
        other.delete("b")
    assert storage.list() == ["a", "c"]
    assert storage.size("nothing") is None
    for call in (storage.read, lambda name: next(storage.chunks(name, 1))):
        with pytest.raises(FileNotFoundError):
            call("nothing")


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/etc/passwd", "a//b", ".", "a/", "./a"]
)
def test_names_that_leave_the_directory_are_refused(name, storage, remote_storage, tmp_path):
    (tmp_path / "outside").write_text("precious")
    for call in (
        lambda: storage.write(name, b"x"),
        lambda: storage.read(name),
        lambda: storage.size(name),
        lambda: storage.delete(name),
        lambda: next(storage.chunks(name, 1)),
        lambda: remote_storage.put_if_absent(name, b"x"),
    ):
        with pytest.raises(ValueError, match="is not a name below"):
            call()
    assert (tmp_path / "outside").read_text() == "precious"


# Local files are written atomically


def test_a_failed_write_keeps_the_old_content_and_no_partial_file(tmp_path, limited_files):
    path = tmp_path / "file"
    atomic_write(path, b"old")
    with limited_files(1 << 16), pytest.raises(OSError) as error:
        atomic_write(path, b"new" * (1 << 16))
    assert error.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_content_reaches_the_disk_before_its_name(tmp_path, monkeypatch):
    """File and directory are synced around the rename, so that power may fail at any time."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        done.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    atomic_write(tmp_path / "file", b"x")
    assert done == ["file", "rename", "directory"]


def test_a_symbolic_link_is_deleted_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    storage = open_storage(str(tmp_path / "store"))
    storage.write("real/file", b"x")
    for link, target in (("step", elsewhere), ("real/inside", elsewhere), ("dangling", "nowhere")):
        (tmp_path / "store" / link).symlink_to(target)
    for name in ("step", "real", "dangling"):
        storage.delete(name)
    assert storage.list() == []
    assert (elsewhere / "precious").read_text() == "x"


# URLs


@pytest.mark.parametrize(
    "url", ["text.txt", "/tmp/x", "file:///tmp/x", "memory://x", "https://a/x", "ftp://127.0.0.1:1"]
)
def test_known_protocols(url):
    check_can_open("data.path", url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://x", "foo://x: the protocol foo:// is unknown"),
        ("simplecache::foo://x", "simplecache::foo://x: the protocol foo:// is unknown"),
        ("reference://x", "reference://x: reference:// needs more than a URL; use a directory"),
        ("filecache://x", "filecache://x: filecache:// needs more than a URL; use a directory"),
        ("https://x/y", "https://x/y: https:// is read-only; use a directory or an object store"),
        ("s3://", "s3:// has no path; add one"),
        ("s3:///", "s3:/// has no path; add one"),
        ("memory://", "memory:// has no path; add one"),
    ],
)
def test_urls_that_are_refused(url, message):
    with pytest.raises(ConfigError) as error:
        check_can_open("snapshot.path", url, writable=True)
    assert str(error.value).startswith(f"config error: snapshot.path={message}")


def test_a_storage_that_cannot_be_opened():
    """FTP, for example, connects when it is opened."""
    message = r"^storage error: cannot open ftp://127.0.0.1:1/x: Connection[^\n]*$"
    with pytest.raises(StorageUnavailableError, match=message):
        open_storage("ftp://127.0.0.1:1/x")
    with pytest.raises(ConfigError, match=r"^config error: URL=dir://x: dir:// needs more than"):
        open_storage("dir://x")


@pytest.mark.parametrize(
    ("url", "package", "advice"),
    [
        ("s3://bucket/x", "s3fs", r"pip install 'mingpt_ddp\[s3\]'"),
        ("s3a://bucket/x", "s3fs", r"pip install 'mingpt_ddp\[s3\]'"),
        ("simplecache::s3://bucket/x", "s3fs", r"pip install 'mingpt_ddp\[s3\]'"),
        # The names of fsspec's extras differ from its protocols.
        ("hf://bucket/x", "huggingface_hub", "huggingface_hub"),
        ("gs://bucket/x", "gcsfs", "gcsfs"),
        ("gcs://bucket/x", "gcsfs", "gcsfs"),
        ("az://bucket/x", "adlfs", "adlfs"),
        ("abfs://bucket/x", "adlfs", "adlfs"),
        ("sftp://bucket/x", "paramiko", "paramiko"),
    ],
)
def test_a_missing_package_is_named(url, package, advice, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    protocol = url.split("::")[-1].split(":")[0]
    monkeypatch.delitem(_registry, protocol, raising=False)
    with pytest.raises(ConfigError, match=rf"{protocol}:// is not installed; .*{advice}"):
        check_can_open("snapshot.path", url)


# Transient errors, permanent errors, and messages


class Unsteady(MemoryFileSystem):
    """A store whose next writes raise `faults`, one after another."""

    protocol = "unsteady"
    cachable = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.faults: list[Exception] = []
        self.writes = 0
        self.answers: list[bytes] = []  # contents that the next reads return

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self.writes += 1
        if self.faults:
            raise self.faults.pop(0)
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def cat_ranges(self, *args, **kwargs):
        return [self.answers.pop(0)] if self.answers else super().cat_ranges(*args, **kwargs)


register_implementation("unsteady", Unsteady, clobber=True)


@pytest.fixture
def unsteady():
    return open_storage(f"unsteady://{uuid.uuid4().hex}")


def store_error(status: int, code: str) -> OSError:
    """Return the error that an S3 client makes from this response."""
    error = OSError(errno.EIO, "the store's message")
    error.__cause__ = Exception()
    error.__cause__.response = {
        "ResponseMetadata": {"HTTPStatusCode": status},
        "Error": {"Code": code},
    }
    return error


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionResetError("reset"),
        TimeoutError(),
        OSError(errno.EIO, "input or output"),
        store_error(503, "SlowDown"),
        store_error(500, "InternalError"),
        store_error(429, "x"),
        store_error(400, "RequestTimeout"),
        store_error(409, "OperationAborted"),
    ],
    ids=repr,
)
def test_transient_errors_are_retried(unsteady, fault):
    unsteady.fs.faults = [fault, fault]
    unsteady.write("file", b"x")
    assert unsteady.read("file") == b"x"
    assert unsteady.fs.writes == 3


def test_a_request_has_more_time_for_more_bytes(unsteady, monkeypatch):
    """A large file must not fail because it takes longer than a small one."""
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 0.05)
    monkeypatch.setattr(remote, "MIN_BANDWIDTH", 1)  # 60 bytes may take a minute
    monkeypatch.setattr(unsteady.fs, "pipe_file", lambda *arguments: time.sleep(1))
    unsteady.write("file", b"x" * 60)
    with pytest.raises(StorageError, match="no response in time"):
        unsteady.write("file", b"")


SECRETS = "no\nftp://me:hunter2@host/x nor https://host/x?X-Amz-Signature=hunter2 !"


@pytest.mark.parametrize(
    ("fault", "message", "number"),
    [
        (PermissionError("denied"), "PermissionError: denied", errno.EACCES),
        (ValueError("no such key"), "ValueError: no such key", None),
        (store_error(403, "AccessDenied"), "AccessDenied: the store's message", errno.EACCES),
        (store_error(400, "InvalidArgument"), "InvalidArgument: the store's message", errno.EIO),
        (store_error(501, "NotImplemented"), "NotImplemented: the store's message", errno.EIO),
        (store_error(507, "Full"), "Full: the store's message", errno.ENOSPC),
        (ValueError(SECRETS), "ValueError: no ftp://***@host/x nor https://host/x?*** !", None),
    ],
    ids=repr,
)
def test_permanent_errors_are_raised_at_once(unsteady, fault, message, number):
    """The error is one line. By its errno, a run knows that a restart would not help."""
    unsteady.fs.faults = [fault]
    with pytest.raises(StorageError) as raised:
        unsteady.write("file", b"x")
    assert str(raised.value) == f"cannot write {unsteady.url}/file: {message}"
    assert raised.value.errno == number
    assert unsteady.fs.writes == 1


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://me:secret@host/api is away", "https://***@host/api is away"),
        ("https://me:sec@ret@host/api is away", "https://***@host/api is away"),
        ("https://host/x and a@b", "https://host/x and a@b"),
        ("https://host/x?X-Amz-Signature=secret&y=1 is away", "https://host/x?*** is away"),
    ],
)
def test_no_credentials(text, redacted):
    assert redact(text) == redacted


def test_more_bytes_than_asked_for_are_an_error_at_once(unsteady):
    """A web server without range requests sends the whole file. Too few bytes are transient."""
    unsteady.write("file", b"x" * 100)
    unsteady.fs.answers = [b"x", b"x" * 100, b"x" * 10]
    message = "ValueError: 100 of 10 bytes arrived; use a server that supports range requests"
    with pytest.raises(StorageError, match=message):
        unsteady.read("file", limit=10)
    assert unsteady.read("file", limit=10) == b"x" * 10
