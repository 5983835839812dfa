"""Files by name below one URL: the same on a local disk and in memory, whole or not at all."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import signal
import uuid

import pytest

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage import Storage, check_url, publish


@pytest.fixture(params=["path", "file://", "memory://"])
def storage(request, tmp_path):
    urls = {"path": str(tmp_path), "file://": f"file://{tmp_path}", "memory://": f"memory://{uuid.uuid4().hex}"}
    return Storage(f"{urls[request.param]}/store")


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


def test_list_has_the_names_of_one_level_sorted(storage):
    assert storage.list() == []
    for name in ("b/2", "a/1", "c", "b/1"):
        storage.write(name, b"x")
    assert storage.list() == ["a", "b", "c"]
    assert storage.child("b").list() == ["1", "2"]


def test_list_sees_what_another_process_wrote(storage):
    other = Storage(storage.url)
    storage.write("a", b"x")
    assert other.list() == ["a"]
    storage.write("b", b"x")
    assert other.list() == ["a", "b"]


def test_delete_file_and_directory(storage):
    storage.write("a/1", b"x")
    storage.write("a/2", b"x")
    storage.delete("a/1")
    assert storage.child("a").list() == ["2"]
    storage.delete("a")
    assert storage.list() == []
    storage.delete("a")  # is not there any more


def test_what_is_not_there(storage):
    assert storage.size("nothing") is None
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")


def test_trailing_slash_makes_no_difference(storage):
    storage.write("a", b"x")
    assert Storage(f"{storage.url}/").read("a") == b"x"


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/passwd", "a//b", ".", "a/", "./a"])
@pytest.mark.parametrize(
    "call",
    [
        lambda storage, name: storage.write(name, b"x"),
        lambda storage, name: storage.read(name),
        lambda storage, name: storage.size(name),
        lambda storage, name: storage.delete(name),
        lambda storage, name: storage.child(name),
    ],
    ids=["write", "read", "size", "delete", "child"],
)
def test_names_that_leave_the_directory_are_refused(call, name, storage, tmp_path):
    (tmp_path / "outside").write_text("precious")
    with pytest.raises(ValueError, match="is not a name below"):
        call(storage, name)
    assert (tmp_path / "outside").read_text() == "precious"


# A local file is published whole or not at all


def test_a_failing_write_leaves_the_old_content_and_no_partial_file(tmp_path):
    """The file may not grow beyond a limit, as on a full disk: the kernel refuses the rest of the bytes."""
    path = tmp_path / "file"
    publish(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError) as error:
            publish(path, b"new" * (1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert error.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_content_reaches_the_disk_before_its_name(tmp_path, monkeypatch):
    """fsync of the file, then the rename, then fsync of the directory: in this order a power failure loses nothing."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        done.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    publish(tmp_path / "file", b"x")
    assert done == ["file", "rename", "directory"]


def test_a_reader_never_sees_a_part(tmp_path):
    """Whoever opened the old file keeps reading the old content: it is replaced, not overwritten."""
    path = tmp_path / "file"
    publish(path, b"old" * 1000)
    with open(path, "rb") as reader:
        publish(path, b"new" * 1000)
        assert reader.read() == b"old" * 1000
    assert path.read_bytes() == b"new" * 1000


def test_overwriting_leaves_no_partial_file(storage):
    for content in (b"1", b"22", b"333"):
        storage.write("file", content)
    assert storage.list() == ["file"]


# URLs


@pytest.mark.parametrize(
    "url",
    ["text.txt", "/tmp/text.txt", "file:///tmp/x", "memory://x", "https://example.com/x", "simplecache::file://x"],
)
def test_known_protocols(url):
    check_url(url, "data.path")


@pytest.mark.parametrize("url", ["foo://x", "simplecache::foo://x"])
def test_unknown_protocol(url):
    with pytest.raises(ConfigError) as error:
        check_url(url, "data.path")
    assert str(error.value) == f"config error: data.path={url}: no such protocol as foo://"


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
@pytest.mark.parametrize("url", ["s3://bucket/x", "s3a://bucket/x", "simplecache::s3://bucket/x"])
def test_a_missing_package_is_named(url):
    with pytest.raises(ConfigError, match=r"snapshot.path=.* is not installed; pip install 'mingpt_ddp\[s3\]'"):
        check_url(url, "snapshot.path")
