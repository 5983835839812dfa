"""Files by name below one URL: the same on a local disk and in memory, written atomically."""

from __future__ import annotations

import array
import errno
import os
import resource
import signal
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from mingpt_ddp.errors import ConfigError, StorageUnavailableError
from mingpt_ddp.storage import storage as local
from mingpt_ddp.storage.remote import remote
from mingpt_ddp.storage.remote.remote_errors import StorageError
from mingpt_ddp.storage.storage import atomic_write
from mingpt_ddp.storage.urls import check_can_open, open_storage


@pytest.fixture
def remote_storage():
    return open_storage(f"memory://{uuid.uuid4().hex}/store")


@pytest.fixture(params=["path", "file://", "memory://"])
def storage(request, tmp_path):
    urls = {
        "path": str(tmp_path),
        "file://": f"file://{tmp_path}",
        "memory://": f"memory://{uuid.uuid4().hex}",
    }
    return open_storage(f"{urls[request.param]}/store")


def test_write_and_read(storage):
    storage.write("a/b/file.bin", b"one")
    assert storage.read("a/b/file.bin") == b"one"
    assert storage.size("a/b/file.bin") == 3
    storage.write("a/b/file.bin", b"")
    assert storage.read("a/b/file.bin") == b""
    assert storage.size("a/b/file.bin") == 0


def test_read_no_more_than_the_limit(storage):
    storage.write("file", b"0123456789")
    assert storage.read("file", limit=4) == b"0123"
    assert storage.read("file", limit=99) == b"0123456789"


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 25])
def test_chunks_are_the_file(storage, length, monkeypatch):
    monkeypatch.setattr(local, "CHUNK", 10)
    monkeypatch.setattr(remote, "PARALLEL", 2)
    monkeypatch.setattr(remote, "PART", 5)
    content = os.urandom(length)
    storage.write("file", content)
    chunks = list(storage.chunks("file", length))
    assert b"".join(chunks) == content
    assert all(len(chunk) == 10 for chunk in chunks[:-1])
    assert b"".join(storage.chunks("file", length // 2)) == content[: length // 2]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_content_of_every_kind(storage, remote_storage, kind):
    storage.write("file", kind(b"some bytes"))
    assert storage.read("file") == b"some bytes"
    remote_storage.put_if_absent("file", kind(b"some bytes"))
    assert remote_storage.read("file") == b"some bytes"


def test_content_of_wider_items_counts_in_bytes(storage):
    storage.write("file", memoryview(array.array("d", [1.0, 2.0])))
    assert storage.size("file") == 16
    assert storage.read("file") == array.array("d", [1.0, 2.0]).tobytes()


def test_put_if_absent_keeps_an_existing_file(remote_storage):
    assert remote_storage.put_if_absent("a/file", b"first")
    assert not remote_storage.put_if_absent("a/file", b"second")
    assert remote_storage.read("a/file") == b"first"
    remote_storage.delete("a/file")
    assert remote_storage.put_if_absent("a/file", b"third")
    assert remote_storage.list() == ["a"]
    assert open_storage(f"{remote_storage.url}/a").list() == ["file"]


def test_of_many_put_if_absent_one_succeeds(remote_storage):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: remote_storage.put_if_absent("file", b"%d" % i), range(40)))
    assert made.count(True) == 1
    assert remote_storage.read("file") == b"%d" % made.index(True)
    assert remote_storage.list() == ["file"]


def test_shared_is_what_other_machines_see(storage, tmp_path):
    assert not storage.shared
    assert not open_storage("simplecache::memory://x").shared
    assert open_storage("http://127.0.0.1:1/x").shared


def test_list_has_the_names_of_one_level_sorted(storage):
    assert storage.list() == []
    for name in ("b/2", "a/1", "c", "b/1"):
        storage.write(name, b"x")
    assert storage.list() == ["a", "b", "c"]
    assert open_storage(f"{storage.url}/b").list() == ["1", "2"]


def test_list_sees_what_another_process_wrote(storage):
    other = open_storage(storage.url)
    storage.write("a", b"x")
    assert other.list() == ["a"]
    storage.write("b", b"x")
    assert other.list() == ["a", "b"]


def test_delete_file_and_directory(storage):
    storage.write("a/1", b"x")
    storage.write("a/2", b"x")
    storage.delete("a/1")
    assert open_storage(f"{storage.url}/a").list() == ["2"]
    storage.delete("a")
    assert storage.list() == []
    storage.delete("a")  # does not exist any more


def test_a_missing_file(storage):
    assert storage.size("nothing") is None
    for call in (storage.read, lambda name: next(storage.chunks(name, 1))):
        with pytest.raises(FileNotFoundError):
            call("nothing")


def test_a_directory_is_not_a_file(storage):
    storage.write("a/1", b"x")
    assert storage.size("a") is None
    assert open_storage(f"{storage.url}/a/1").list() == []


def test_trailing_slash_makes_no_difference(storage):
    storage.write("a", b"x")
    assert open_storage(f"{storage.url}/").read("a") == b"x"


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/etc/passwd", "a//b", ".", "a/", "./a"]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda storage, name: storage.write(name, b"x"),
        lambda storage, name: storage.read(name),
        lambda storage, name: storage.size(name),
        lambda storage, name: storage.delete(name),
        lambda storage, name: next(storage.chunks(name, 1)),
    ],
    ids=["write", "read", "size", "delete", "chunks"],
)
def test_names_that_leave_the_directory_are_refused(call, name, storage, tmp_path):
    (tmp_path / "outside").write_text("precious")
    with pytest.raises(ValueError, match="is not a name below"):
        call(storage, name)
    assert (tmp_path / "outside").read_text() == "precious"


@pytest.mark.parametrize("name", ["../outside", "a//b", "a/"])
def test_put_if_absent_refuses_names_that_leave_the_directory(remote_storage, name):
    with pytest.raises(ValueError, match="is not a name below"):
        remote_storage.put_if_absent(name, b"x")


# Local files are written atomically


def test_a_failed_write_keeps_the_old_content_and_no_partial_file(tmp_path):
    """The file may not grow beyond a limit, as on a full disk."""
    path = tmp_path / "file"
    atomic_write(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError) as error:
            atomic_write(path, b"new" * (1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert error.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_content_reaches_the_disk_before_its_name(tmp_path, monkeypatch):
    """Fsync the file, rename it, fsync the directory: a power failure loses nothing."""
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
    for link in ("step", "real/inside"):
        (tmp_path / "store" / link).symlink_to(elsewhere)
    storage.delete("step")
    storage.delete("real")
    assert storage.list() == []
    (tmp_path / "store" / "dangling").symlink_to(tmp_path / "nowhere")
    storage.delete("dangling")
    assert storage.list() == []
    assert (elsewhere / "precious").read_text() == "x"


def test_a_reader_never_sees_partial_content(tmp_path):
    """It keeps reading the old file, which is replaced, not overwritten."""
    path = tmp_path / "file"
    atomic_write(path, b"old" * 1000)
    with open(path, "rb") as reader:
        atomic_write(path, b"new" * 1000)
        assert reader.read() == b"old" * 1000
    assert path.read_bytes() == b"new" * 1000


def test_overwriting_leaves_no_partial_file(storage):
    for content in (b"1", b"22", b"333"):
        storage.write("file", content)
    assert storage.list() == ["file"]


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "text.txt",
        "/tmp/text.txt",
        "file:///tmp/x",
        "memory://x",
        "https://example.com/x",
        "simplecache::file://x",
    ],
)
def test_known_protocols(url):
    check_can_open("data.path", url)


def test_a_required_library_is_not_imported_to_check_a_url(monkeypatch):
    monkeypatch.setattr("fsspec.get_filesystem_class", None)
    check_can_open("data.path", "https://example.com/x")


@pytest.mark.parametrize("url", ["foo://x", "simplecache::foo://x"])
def test_unknown_protocol(url):
    with pytest.raises(ConfigError) as error:
        check_can_open("data.path", url)
    assert str(error.value) == f"config error: data.path={url}: no such protocol as foo://"


@pytest.mark.parametrize("url", ["reference://x", "dir://x", "filecache://x"])
def test_a_protocol_that_needs_more_than_a_url(url):
    protocol = url.split(":")[0]
    with pytest.raises(ConfigError) as error:
        check_can_open("snapshot.path", url)
    assert str(error.value) == (
        f"config error: snapshot.path={url}: {protocol}:// needs more than a URL; use a "
        "directory or an object store"
    )
    with pytest.raises(ConfigError, match=f"^config error: URL={url}: "):
        open_storage(url)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "memory://", "dir://"])
def test_a_protocol_alone(url):
    with pytest.raises(ConfigError, match=f"snapshot.path={url} has no path; add one"):
        check_can_open("snapshot.path", url)


def test_a_storage_that_does_not_respond_when_opened():
    """FTP, for example, connects when it is opened."""
    url = "ftp://127.0.0.1:1/x"
    check_can_open("snapshot.path", url)
    with pytest.raises(
        StorageUnavailableError, match=rf"^storage error: cannot open {url}: Connection[^\n]*$"
    ):
        open_storage(url)


@pytest.mark.parametrize("url", ["s3://bucket/x", "s3a://bucket/x", "simplecache::s3://bucket/x"])
def test_a_missing_package_is_named(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "s3a"):
        monkeypatch.delitem(_registry, protocol, raising=False)
    with pytest.raises(
        ConfigError, match=r"snapshot.path=.* is not installed; pip install 'mingpt_ddp\[s3\]'"
    ):
        check_can_open("snapshot.path", url)


@pytest.mark.parametrize(
    ("protocol", "package"),
    [
        ("hf", "huggingface_hub"),
        ("gs", "gcsfs"),
        ("gcs", "gcsfs"),
        ("az", "adlfs"),
        ("abfs", "adlfs"),
        ("sftp", "paramiko"),
    ],
)
def test_the_package_of_another_protocol_is_one_that_exists(protocol, package, monkeypatch):
    """fsspec's extras have other names than its protocols."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, protocol, raising=False)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(ConfigError, match=rf"{protocol}:// is not installed; .*{package}"):
        check_can_open("snapshot.path", f"{protocol}://bucket/x")


# Transient errors, permanent errors, and messages


class Unsteady(MemoryFileSystem):
    """Raises each of `faults` once; `calls` counts the writes."""

    protocol = "unsteady"
    cachable = False
    faults: ClassVar[list[Exception]] = []
    calls = 0

    def pipe_file(self, *args, **kwargs):
        Unsteady.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return super().pipe_file(*args, **kwargs)


@pytest.fixture
def unsteady(monkeypatch):
    monkeypatch.setitem(_registry, "unsteady", Unsteady)
    monkeypatch.setattr(Unsteady, "calls", 0)
    monkeypatch.setattr(remote, "INITIAL_BACKOFF_S", 0.01)
    storage = open_storage(f"unsteady://{uuid.uuid4().hex}")
    yield storage
    Unsteady.faults.clear()


def store_error(status: int, code: str) -> OSError:
    """Make an error as an S3 client does from a response."""
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
    Unsteady.faults[:] = [fault, fault]
    unsteady.write("file", b"x")
    assert unsteady.read("file") == b"x"
    assert Unsteady.calls == 3


@pytest.mark.parametrize(
    "fault",
    [
        PermissionError("denied"),
        ValueError("no such key"),
        store_error(403, "AccessDenied"),
        store_error(400, "InvalidArgument"),
        store_error(501, "NotImplemented"),
        store_error(507, "Full"),
    ],
    ids=repr,
)
def test_permanent_errors_are_raised_at_once(unsteady, fault):
    Unsteady.faults[:] = [fault]
    with pytest.raises(StorageError, match=f"^cannot write unsteady:.*/file: .*{fault.args[-1]}$"):
        unsteady.write("file", b"x")
    assert Unsteady.calls == 1


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (PermissionError("denied"), errno.EACCES),
        (store_error(403, "AccessDenied"), errno.EACCES),
        (store_error(507, "Full"), errno.ENOSPC),
        (ValueError("no such key"), None),
    ],
    ids=repr,
)
def test_permanent_errors_have_the_errno_of_a_disk(unsteady, fault, expected):
    """By which a run knows that no restart would help."""
    Unsteady.faults[:] = [fault]
    with pytest.raises(StorageError) as raised:
        unsteady.write("file", b"x")
    assert raised.value.errno == expected


def test_an_operation_ends_at_its_deadline(unsteady, monkeypatch):
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 1.0)
    Unsteady.faults[:] = [store_error(503, "SlowDown")] * 1000
    with pytest.raises(StorageError, match=r"SlowDown: the store's message \(tried for \d+ s\)$"):
        unsteady.write("file", b"x")
    assert Unsteady.calls > 2
    assert unsteady.size("file") is None


@pytest.mark.parametrize(
    ("answer", "made"),
    [(b"mine", True), (b"theirs", False)],
    ids=["the answer was lost", "another process was faster"],
)
def test_put_if_absent_whose_first_response_was_lost(unsteady, answer, made):
    """A reset, then a refusal: only the content shows who wrote the file."""

    def reset_after_writing(*args, **kwargs):
        Unsteady.calls += 1
        if Unsteady.calls == 1:
            MemoryFileSystem.pipe_file(unsteady.fs, args[0], answer)
            raise ConnectionResetError
        raise FileExistsError

    unsteady.fs.pipe_file = lambda path, value, mode="overwrite": reset_after_writing(path, value)
    assert unsteady.put_if_absent("file", b"mine") is made


def test_more_bytes_than_asked_for_are_an_error_at_once(unsteady, monkeypatch):
    """A web server without ranges sends the whole file; a shortfall is transient."""
    unsteady.write("file", b"x" * 100)
    answers = []

    def cat_ranges(paths, starts, ends, **kwargs):
        answers.append(b"x" * 100 if answers else b"x")
        return answers[-1:]

    monkeypatch.setattr(unsteady.fs, "cat_ranges", cat_ranges)
    with pytest.raises(
        StorageError, match="ValueError: 100 of 10 bytes arrived; use a server with ranges"
    ):
        unsteady.read("file", limit=10)
    assert len(answers) == 2


def test_a_message_has_one_line_and_no_password(unsteady):
    Unsteady.faults[:] = [
        PermissionError("no\nftp://me:hunter2@host/x nor https://host/x?X-Amz-Signature=hunter2 !")
    ]
    with pytest.raises(StorageError) as error:
        unsteady.write("file", b"x")
    assert "hunter2" not in str(error.value)
    assert str(error.value).endswith("no ftp://***@host/x nor https://host/x?*** !")
