"""Check files on an S3 server behind a faulty network: writes are atomic, and all calls return."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_proxy import Fault, FaultProxy, Rule
from launching import wait_for

from mingpt_ddp.storage.remote import remote
from mingpt_ddp.storage.remote.remote import StorageError
from mingpt_ddp.storage.urls import open_storage

MIB = 1 << 20
LARGE = os.urandom(12 * MIB)  # uploaded in three parts
PUT, PART, GET = r"^PUT /\S+/file(\?x-id=\S*)? ", r"^PUT \S+partNumber=2", "^GET /.*file"
START, COMPLETE = r"^POST \S+\?uploads", r"^POST \S+\?uploadId"
NAMES = {PUT: "put", PART: "part", START: "start", COMPLETE: "complete"}
ALWAYS = float("inf")


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 3.0)
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 30.0)
    monkeypatch.setattr(remote, "MIN_BANDWIDTH", 32 * MIB)
    monkeypatch.setattr(remote, "INITIAL_BACKOFF_S", 0.05)
    monkeypatch.setattr(remote, "MAX_BACKOFF_S", 0.5)
    monkeypatch.setattr(remote, "PART_BYTES", 5 * MIB)  # servers do not accept smaller parts


@pytest.fixture(scope="module")
def bucket(seaweed):
    return seaweed.make_bucket("runs")


@pytest.fixture
def url(seaweed, bucket, monkeypatch, tmp_path):
    """Return the URL of a new directory. The environment names only this server."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(url, seaweed, monkeypatch):
    proxy = FaultProxy(seaweed.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.environment(proxy.port)["AWS_ENDPOINT_URL"])
    yield proxy
    proxy.close()


def test_files_in_a_bucket(url):
    storage = open_storage(url)
    assert storage.shared
    assert storage.list() == []
    for name in ("b/1", "b/2", "a", "empty"):
        storage.write(name, name.encode() if name != "empty" else b"")
    assert storage.list() == ["a", "b", "empty"]
    assert open_storage(f"{url}/b").list() == ["1", "2"]
    assert storage.read("b/2") == b"b/2"
    assert storage.read("b/2", limit=1) == b"b"
    assert storage.read("empty", limit=9) == b""
    assert list(storage.chunks("empty", 0)) == []
    assert [storage.size(name) for name in ("b/1", "empty", "b", "c")] == [3, 0, None, None]
    with pytest.raises(FileNotFoundError):
        storage.read("c")
    storage.delete("b")
    storage.delete("b")
    assert [storage.size(name) for name in ("a", "b/1", "b/2")] == [1, None, None]


def test_listings_are_never_stale(url):
    one, other = open_storage(url), open_storage(url)
    for i in range(3):
        one.write(f"{i}", b"x" * i)
        assert other.list() == [f"{k}" for k in range(i + 1)]
        assert other.size(f"{i}") == i
        one.write("again", b"y" * i)
        assert other.size("again") == i
        one.delete("again")


def test_a_large_file_in_parts(url, proxy, seaweed, bucket, monkeypatch):
    storage = open_storage(url)
    storage.write("file", memoryview(LARGE))
    assert len([line for line in proxy.request_lines if "partNumber=" in line]) == 3
    assert storage.size("file") == len(LARGE)
    assert storage.read("file") == LARGE
    assert storage.read("file", limit=6 * MIB) == LARGE[: 6 * MIB]
    monkeypatch.setattr(remote, "CONCURRENT_PARTS", 1)
    chunks = list(storage.chunks("file", len(LARGE)))
    assert [len(chunk) for chunk in chunks] == [5 * MIB, 5 * MIB, 2 * MIB]
    assert b"".join(chunks) == LARGE
    assert seaweed.unfinished_uploads(bucket) == []


def test_parts_are_not_compared_with_the_checksum_of_the_whole(url):
    """Some servers send the checksum of the whole object with each part.

    A client that compares the two cannot read objects of several parts.
    """
    storage = open_storage(url)
    storage.write("file", LARGE[: 6 * MIB])
    assert storage.read("file") == LARGE[: 6 * MIB]
    assert storage.fs.s3.meta.config.response_checksum_validation == "when_required"


# put_if_absent


def test_only_one_of_many_put_if_absent_succeeds(url):
    with ThreadPoolExecutor(6) as pool:
        made = list(
            pool.map(lambda i: open_storage(url).put_if_absent("file", b"%d" % i), range(6))
        )
    assert made.count(True) == 1
    assert open_storage(url).read("file") == b"%d" % made.index(True)


def test_the_server_refuses_to_overwrite(url, monkeypatch):
    """Another process writes the file between the check and the write of this process."""
    storage = open_storage(url)
    storage.write("file", b"theirs")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "size", lambda path: None)
        assert not storage.put_if_absent("file", b"mine")
    assert storage.read("file") == b"theirs"


def test_put_if_absent_when_the_response_is_lost(url, proxy):
    proxy.rules = [Rule(PUT, Fault.RESET_UNANSWERED)]
    assert open_storage(url).put_if_absent("file", b"content of its own")
    assert proxy.rules[0].hits == 1
    assert not open_storage(url).put_if_absent("file", b"another")


# Transient faults

ONCE = {
    "503": {"fault": Fault.STATUS, "status": 503},
    "500": {"fault": Fault.STATUS, "status": 500},
    "reset before": {"fault": Fault.RESET_BEFORE},
    "reset while sending": {"fault": Fault.RESET_SENDING, "after": 10_000},
    "reset instead of the answer": {"fault": Fault.RESET_UNANSWERED},
}
ALL = {
    **ONCE,
    "reset while answering": {"fault": Fault.RESET_ANSWERING, "after": 1000},
    "stall": {"fault": Fault.STALL},
}


@pytest.mark.parametrize(
    ("match", "fault"),
    [
        *((match, fault) for match in (PUT, PART) for fault in ONCE),
        *(
            (match, fault)
            for match in (START, COMPLETE)
            for fault in ("503", "reset instead of the answer")
        ),
    ],
    ids=lambda value: NAMES.get(value, value),
)
def test_a_write_survives(fault, match, url, proxy, seaweed, bucket):
    content = LARGE[:50_000] if match == PUT else LARGE
    proxy.rules = [Rule(match, times=2, **ONCE[fault])]
    storage = open_storage(url)
    storage.write("file", content)
    assert proxy.rules[0].hits == 2
    assert storage.read("file") == content
    storage.delete("file")  # this also aborts an upload whose creation got no response
    assert seaweed.unfinished_uploads(bucket) == []


@pytest.mark.parametrize("match", [PUT, PART], ids=["put", "part"])
@pytest.mark.parametrize(
    "fault", [Fault.STALL, Fault.STALL_SENDING], ids=["at once", "while sending"]
)
def test_a_write_survives_a_stall(fault, match, url, proxy, monkeypatch):
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 1.0)
    content = LARGE[:50_000] if match == PUT else LARGE
    proxy.rules = [Rule(match, fault, after=10_000)]
    storage = open_storage(url)
    storage.write("file", content)
    assert proxy.rules[0].hits == 1
    assert storage.read("file") == content


@pytest.mark.parametrize("fault", ALL)
def test_a_read_survives(fault, url, proxy, monkeypatch):
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 1.0)
    content = LARGE[: 6 * MIB]
    storage = open_storage(url)
    storage.write("file", content)
    proxy.rules = [Rule(GET, **ALL[fault])]
    assert storage.read("file") == content
    assert proxy.rules[0].hits == 1
    proxy.rules = [Rule(GET, **ALL[fault])]
    assert b"".join(storage.chunks("file", len(content))) == content
    proxy.rules = [Rule("", **ALL[fault])]
    assert storage.list() == ["file"]
    proxy.rules = [Rule("", **ALL[fault])]
    assert storage.size("file") == len(content)
    proxy.rules = [Rule("^DELETE|^POST", **ALL[fault])]
    storage.delete("file")
    assert storage.size("file") is None


def test_many_random_faults(url, proxy):
    faults = [*ONCE.values(), {"fault": Fault.DELAY, "seconds": 0.1}]
    proxy.rules = [Rule("", times=ALWAYS, probability=0.06, **fault) for fault in faults]
    storage = open_storage(url)
    for i in range(20):
        content = b"%d " % i * 5000
        storage.write(f"{i}", content)
        assert storage.read(f"{i}") == content
    assert storage.list() == sorted(f"{i}" for i in range(20))
    assert sum(rule.hits for rule in proxy.rules) > 10


# Permanent faults


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        *(
            (LARGE[:50_000], fault)
            for fault in ("500", "503", "reset before", "reset while sending", "stall")
        ),
        *((LARGE, fault) for fault in ("503", "reset instead of the answer", "stall")),
    ],
    ids=lambda value: {50_000: "small", len(LARGE): "large"}.get(len(value), value),
)
def test_a_write_ends(content, fault, url, proxy, seaweed, bucket, monkeypatch):
    storage = open_storage(url)
    storage.write("file", b"old")
    proxy.rules = [Rule(PART if content is LARGE else PUT, times=ALWAYS, **ALL[fault])]
    # These limits apply only here, since on a loaded machine successful writes may take longer.
    with monkeypatch.context() as limits:
        limits.setattr(remote, "REQUEST_TIMEOUT_S", 1.0)
        limits.setattr(remote, "OPERATION_DEADLINE_S", 1.0)
        # This message shows that our deadline ended the write. The client's own limits have others.
        ended = rf"^cannot write {url}/file: .* \(tried for \d+ s\)$"
        with pytest.raises(StorageError, match=ended):
            storage.write("file", content)
    proxy.heal()
    assert storage.read("file") == b"old"
    assert seaweed.unfinished_uploads(bucket) == []
    storage.write("file", content)
    assert storage.read("file") == content


def test_a_store_that_is_down(url, proxy, monkeypatch):
    storage = open_storage(url)
    storage.write("file", b"old")
    proxy.down = True
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 0.4)
    calls = [
        lambda: storage.write("file", b"new"),
        lambda: storage.read("file"),
        lambda: storage.size("file"),
    ]
    for call in [
        *calls,
        storage.list,
        lambda: storage.put_if_absent("x", b"x"),
        lambda: storage.delete("file"),
    ]:
        with pytest.raises(StorageError, match=r"^cannot [^\n]*$"):
            call()
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 30.0)
    threading.Timer(1.0, proxy.heal).start()
    storage.write("file", b"new")  # the write starts while the store is still down
    assert storage.read("file") == b"new"


@pytest.fixture(params=["accepts and never answers", "does not accept"])
def black_hole(request):
    """Open a local port that answers no request, or that does not even accept connections."""
    with socket.socket() as listening, socket.socket() as one, socket.socket() as other:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0 if request.param == "does not accept" else 50)
        # These connections fill the port's backlog.
        for waiting in (one, other) if request.param == "does not accept" else ():
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    "call", ["write", "write a large file", "read", "chunks", "size", "list", "delete", "create"]
)
def test_a_black_hole_times_out_at_the_deadline(call, url, seaweed, black_hole, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.environment(black_hole)["AWS_ENDPOINT_URL"])
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 0.4)
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 1.0)
    storage = open_storage(url)
    calls = {
        "write": lambda: storage.write("file", b"x"),
        "write a large file": lambda: storage.write("file", LARGE),
        "read": lambda: storage.read("file"),
        "chunks": lambda: list(storage.chunks("file", 1)),
        "size": lambda: storage.size("file"),
        "list": storage.list,
        "delete": lambda: storage.delete("file"),
        "create": lambda: storage.put_if_absent("file", b"x"),
    }
    # This message shows that our deadline ended the call. The client's own timeouts have others.
    ended = rf"^cannot [a-z ]+ {url}\S*: [^\n]* \(tried for \d+ s\)$"
    with pytest.raises(StorageError, match=ended):
        calls[call]()


def test_access_denied_is_reported_at_once(url, proxy):
    proxy.rules = [Rule("", Fault.STATUS, times=ALWAYS, status=403)]
    storage = open_storage(url)
    with pytest.raises(
        StorageError, match=rf"^cannot write {url}/file: AccessDenied: injected 403$"
    ):
        storage.write("file", b"x")
    assert len(proxy.request_lines) == 1


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_reported_at_once(wrong, url, seaweed, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "mingpt_ddp")
    monkeypatch.setenv(wrong, "hunter2hunter2")
    storage = open_storage(url)
    for call in (lambda: storage.write("file", b"x"), storage.list, lambda: storage.read("file")):
        with pytest.raises(
            StorageError,
            match=r"^cannot [^\n]*(InvalidAccessKeyId|SignatureDoesNotMatch|403)[^\n]*$",
        ) as error:
            call()
        shown = str(error.value) + caplog.text
        assert "tried for" not in shown, "until the deadline"
        assert "hunter2" not in shown
        assert seaweed.secret not in shown


def test_a_missing_bucket_is_not_created(url, seaweed):
    storage = open_storage("s3://no-such-bucket/run")
    calls = [
        lambda: storage.write("file", LARGE),
        lambda: storage.write("file", b"x"),
        lambda: storage.read("file"),
        storage.list,
        lambda: storage.put_if_absent("file", b"x"),
        lambda: storage.size("file"),
    ]
    for call in [*calls, lambda: storage.delete("file")]:
        with pytest.raises(StorageError, match="NoSuchBucket"):
            call()
    assert "no-such-bucket" not in seaweed.buckets()


def test_delete_aborts_the_uploads_of_a_killed_process(url, seaweed, bucket):
    """A process that is killed during an upload leaves parts that no listing shows."""
    prefix = url.removeprefix(f"s3://{bucket}/")
    for name in ("step_1/file", "step_10/file"):
        seaweed._call("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{name}")
    open_storage(url).delete("step_1")
    assert seaweed.unfinished_uploads(bucket) == [f"{prefix}/step_10/file"]
    open_storage(url).delete("step_10")
    assert seaweed.unfinished_uploads(bucket) == []


# The environment variables and files that all AWS tools read


@pytest.mark.parametrize("source", ["AWS_ENDPOINT_URL_S3", "files", "profile"])
def test_the_endpoint_is_read_where_aws_tools_read_it(source, url, seaweed, monkeypatch, tmp_path):
    values = seaweed.environment()
    endpoint = values["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    if source == "AWS_ENDPOINT_URL_S3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv(source, endpoint)
    else:
        profile, section = ("default", "default") if source == "files" else ("lab", "profile lab")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name)
        (tmp_path / "config").write_text(
            f"[{section}]\nregion = us-east-1\nendpoint_url = {endpoint}\n"
        )
        key = f"aws_access_key_id = {seaweed.key}\naws_secret_access_key = {seaweed.secret}\n"
        (tmp_path / "credentials").write_text(f"[{profile}]\n{key}")
        if source == "profile":
            monkeypatch.setenv("AWS_PROFILE", "lab")
    storage = open_storage(url)
    storage.write("file", b"x")
    assert storage.list() == ["file"]


# This test comes last, since it kills the server, which then is unavailable for a while.


def test_acknowledged_writes_survive_the_server(url, seaweed, bucket, monkeypatch):
    """The server is killed during writes.

    Files whose writes have returned are whole, and the current write survives the restart.
    """
    monkeypatch.setattr(remote, "OPERATION_DEADLINE_S", 300.0)
    contents = [LARGE if i % 4 == 1 else os.urandom(200_000) for i in range(8)]
    done: list[int] = []

    def write_all() -> None:
        storage = open_storage(url)
        for i, content in enumerate(contents):
            storage.write(f"{i}", content)
            done.append(i)

    writer = threading.Thread(target=write_all)
    writer.start()
    try:
        wait_for(lambda: len(done) >= 5 or not writer.is_alive(), what="five writes")
        # The next file is large.
        wait_for(lambda: seaweed.unfinished_uploads(bucket) or len(done) > 5, what="its upload")
        seaweed.kill()
        seaweed.start()
        assert all(open_storage(url).read(f"{i}") == contents[i] for i in list(done))
    finally:
        writer.join(400)
    assert done == list(range(8))
    assert all(open_storage(url).read(f"{i}") == content for i, content in enumerate(contents))
    for i in done:
        open_storage(url).delete(f"{i}")
    assert seaweed.unfinished_uploads(bucket) == []
