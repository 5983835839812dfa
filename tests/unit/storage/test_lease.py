"""A lease allows one writer at a time in an object store. Here, the store is in memory."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation
from launching import wait_for

from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.storage import lease as module
from mingpt_ddp.storage.lease import OWNER, Lease
from mingpt_ddp.storage.remote.remote_errors import StorageError
from mingpt_ddp.storage.urls import open_storage

HEARTBEAT_INTERVAL_S = 0.05
SHORT_TTL_S = 0.4
TAKEOVER_GRACE_S = 0.1
# Each read without news adds at most half a heartbeat interval to the measured silence.
READS_UNTIL_STALE = int(SHORT_TTL_S / (HEARTBEAT_INTERVAL_S / 2))


class Connection(MemoryFileSystem):
    """The connection of one process to the store."""

    protocol = "connection"
    cachable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_cut = False  # True simulates a process that was killed or suspended
        self.writing = threading.Lock()
        self.damaged_reads = 0  # number of next reads that return a damaged record
        self.slow_read = 0  # number of the read that takes longer than SHORT_TTL_S
        self.reads = 0  # number of reads of a record so far

    def info(self, path, **kwargs):
        self._check()
        self.reads += 1
        return super().info(path, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        with self.writing:
            self._check()
            return super().pipe_file(path, value, mode=mode, **kwargs)

    def cat_ranges(self, *args, **kwargs):
        self._check()
        parts = super().cat_ranges(*args, **kwargs)
        if self.reads == self.slow_read:
            time.sleep(2 * SHORT_TTL_S)
        if self.damaged_reads > 0:
            self.damaged_reads -= 1
            return [b"{".ljust(len(part)) for part in parts]
        return parts

    def cut(self) -> None:
        """Let all requests fail from now on. A write that is under way completes or fails."""
        with self.writing:
            self.is_cut = True

    def _check(self) -> None:
        if self.is_cut:
            raise PermissionError("the store is down")


register_implementation("connection", Connection, clobber=True)


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Shorten the waits, but not LEASE_TTL_S: on a busy machine a live owner may be slow."""
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", HEARTBEAT_INTERVAL_S)
    monkeypatch.setattr(module, "TAKEOVER_GRACE_S", TAKEOVER_GRACE_S)


@pytest.fixture
def short_ttl(monkeypatch):
    """Let a lease without heartbeats become stale after SHORT_TTL_S. Only for dead owners."""
    monkeypatch.setattr(module, "LEASE_TTL_S", SHORT_TTL_S)


@pytest.fixture
def connect() -> Callable:
    """Return a function that opens a new connection to the same directory of the store."""
    url = f"connection://{uuid.uuid4().hex}"
    return lambda: open_storage(url)


@pytest.fixture
def storage(connect):
    """Return the test's own connection, which is never cut."""
    return connect()


@pytest.fixture
def acquire(connect):
    """Return a function that acquires leases, each on its own connection, until the test ends."""
    taken: list[Lease] = []

    def acquire(dead: str | None = None, storage=None) -> Lease:
        taken.append(Lease(storage or connect(), dead))
        return taken[-1]

    yield acquire
    for lease in taken:
        lease.release()


@pytest.fixture
def dead_owner(acquire) -> Lease:
    """Return a lease whose owner sends no more heartbeats."""
    lease = acquire()
    lease.storage.fs.cut()
    return lease


def owner(storage) -> dict:
    return json.loads(storage.read(OWNER))


def write_record(storage, **record) -> None:
    storage.write(OWNER, json.dumps(record).encode())


def waits(log_lines: list[str]) -> bool:
    return any("waiting 60 s for a heartbeat" in line for line in log_lines)


def misses_heartbeat(log_lines: list[str]) -> bool:
    return any("cannot send a heartbeat to" in line for line in log_lines)


def test_a_live_owner_keeps_the_lease_and_is_named(storage, acquire, log_lines, monkeypatch):
    """The clock of another machine may be wrong by years, since clocks are not compared."""
    lease = acquire()
    assert not waits(log_lines)
    assert owner(storage).keys() == {"id", "owner", "heartbeat"}
    message = r"is locked by process \d+ on .*still running.*run\.name"
    for dead, clock in ((None, None), ("somebody else", None), (None, 0.0), (None, 4e9)):
        with monkeypatch.context() as patch, pytest.raises(RunError, match=message):
            if clock is not None:
                patch.setattr(time, "time", lambda clock=clock: clock)
            acquire(dead)
    lease.check()
    assert owner(storage)["id"] == lease.id


def test_a_record_keeps_its_length(storage, acquire):
    """A reader asks for the size and then for that many bytes. A heartbeat may come in between.

    A record that was deleted is written again.
    """
    lease = acquire()
    sizes = set()

    def has_sent_eleven() -> bool:
        sizes.add(storage.size(OWNER))
        return int(owner(storage)["heartbeat"]) > 10

    wait_for(has_sent_eleven, what="heartbeats")
    assert len(sizes) == 1
    storage.delete(OWNER)
    lease.check()
    wait_for(lambda: storage.size(OWNER) in sizes, what="the record")


def test_a_record_that_is_damaged_for_a_moment_is_not_a_takeover(storage, acquire, connect):
    """A reader may see such a record while the store replaces it."""
    lease = acquire()
    other = connect()
    other.fs.damaged_reads = 1
    with pytest.raises(RunError, match="still running"):
        acquire(storage=other)
    lease.storage.fs.damaged_reads = 1
    lease.check()
    wait_for(lambda: lease.storage.fs.damaged_reads == 0, what="the damaged read")
    lease.check()
    lease.storage.fs.damaged_reads = 1000
    with pytest.raises(RunError, match="was taken over by another process"):
        lease.check()


def test_a_stale_lease_is_taken_over(short_ttl, storage, acquire, dead_owner):
    """The former owner was only slow or suspended, and then continues."""
    new = acquire()
    assert new.storage.fs.reads >= READS_UNTIL_STALE
    assert owner(storage)["id"] == new.id
    dead_owner.storage.fs.is_cut = False
    with pytest.raises(RunError, match=r"was taken over by process \d+ on"):
        dead_owner.check()
    dead_owner.release()
    new.check()
    assert owner(storage)["id"] == new.id, "it released the lease of another process"


def test_a_late_heartbeat_of_the_former_owner(short_ttl, storage, acquire, dead_owner):
    """It was suspended between its check and its write. It ends, and its successor does not."""
    stale = owner(storage)
    new = acquire()
    late = {**stale, "heartbeat": f"{int(stale['heartbeat']) + 1:015d}"}
    write_record(storage, **late)
    new.check()
    assert owner(storage)["id"] == new.id
    dead_owner.storage.fs.is_cut = False
    with pytest.raises(RunError, match="was taken over by process"):
        dead_owner.check()

    def is_lost() -> bool:
        """Let the former owner continue. The new owner's heartbeat may still replace its record."""
        write_record(storage, **{**late, "heartbeat": f"{int(late['heartbeat']) + 1:015d}"})
        try:
            new.check()
        except RunError:
            return True
        return False

    wait_for(is_lost, what="the end of the new owner")


def test_an_owner_known_to_be_dead_is_not_waited_for(storage, acquire, dead_owner, log_lines):
    new = acquire(dead=dead_owner.id)
    assert not waits(log_lines)
    assert owner(storage)["id"] == new.id


def test_a_takeover_is_final(storage, dead_owner, log_lines):
    """The old owner sends no more heartbeats, even after the new owner has released the lease."""
    old = dead_owner
    wait_for(lambda: misses_heartbeat(log_lines), what="the end of the last heartbeat")
    record = {"id": "another", "owner": "process 1 on elsewhere", "heartbeat": 0}
    write_record(storage, **record)
    old.storage.fs.is_cut = False
    time.sleep(6 * HEARTBEAT_INTERVAL_S)
    assert owner(storage) == record
    storage.delete(OWNER)
    for _ in range(2):
        with pytest.raises(RunError, match="was taken over by process 1 on elsewhere"):
            old.check()


def test_a_released_lease_is_free(storage, acquire, log_lines):
    acquire().release()
    wait_for(lambda: storage.size(OWNER) is None, what="the release")
    time.sleep(3 * HEARTBEAT_INTERVAL_S)
    assert storage.size(OWNER) is None, "a last heartbeat wrote the object again"
    acquire()
    assert not waits(log_lines)


def test_release_while_another_waits(storage, acquire, dead_owner, log_lines):
    """A process that waits for a heartbeat acquires a lease that is released meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acquire)
        wait_for(lambda: waits(log_lines), what="the wait for a heartbeat")
        storage.delete(OWNER)
        new = waiting.result()
    assert owner(storage)["id"] == new.id


@pytest.mark.parametrize("before", ["free", "dead", "dead and known"])
def test_of_several_processes_one_acquires(
    before, short_ttl, storage, acquire, request, monkeypatch
):
    # longer than a busy machine may suspend a thread before its write
    monkeypatch.setattr(module, "TAKEOVER_GRACE_S", 2.0)
    old = None if before == "free" else request.getfixturevalue("dead_owner")
    dead = old.id if before == "dead and known" else None
    start = threading.Barrier(4)

    def attempt(_):
        start.wait()
        try:
            return acquire(dead)
        except RunError:
            return None

    with ThreadPoolExecutor(4) as pool:
        winners = [lease for lease in pool.map(attempt, range(4)) if lease is not None]
    assert len(winners) == 1
    winners[0].check()
    assert owner(storage)["id"] == winners[0].id


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b"null", b'{"id": 3, "owner": ["x"]}', b"[" * 9999]
)
def test_a_damaged_record_has_no_live_owner(short_ttl, storage, acquire, content):
    """It must stay damaged for a while, since its owner may be replacing it."""
    storage.write(OWNER, content)
    lease = acquire()
    assert lease.storage.fs.reads >= READS_UNTIL_STALE
    assert owner(storage)["id"] == lease.id


def test_an_owner_whose_damaged_record_becomes_readable_is_alive(storage, acquire, connect):
    """Control characters and long names in a record are not printed."""
    storage.write(OWNER, b"{")
    other = connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acquire, storage=other)
        wait_for(lambda: other.fs.reads > 4, what="looks at the record")
        write_record(storage, id="x", owner="process 1\n on elsewhere " + "c" * 999)
        with pytest.raises(
            RunError, match=r"locked by process 1 on elsewhere c+, which"
        ) as refused:
            waiting.result()
    assert len(str(refused.value)) < 400
    assert owner(storage)["id"] == "x"


def test_an_outage_of_the_store(storage, acquire, connect, log_lines):
    """The owner survives it, nobody takes over meanwhile, and a release raises no error."""
    lease = acquire()
    down = connect()
    for each in (down, lease.storage):
        each.fs.cut()
    with pytest.raises(StorageError):
        lease.check()
    message = f"cannot use {storage.url}: .*the store is down"
    with pytest.raises(StorageUnavailableError, match=message):
        acquire(storage=down)
    wait_for(lambda: misses_heartbeat(log_lines), what="a missed heartbeat")
    lease.storage.fs.is_cut = False
    before = owner(storage)["heartbeat"]
    wait_for(lambda: owner(storage)["heartbeat"] > before, what="a heartbeat")
    lease.check()
    lease.storage.fs.cut()
    lease.release()


def test_a_slow_read_does_not_make_a_lease_stale(short_ttl, acquire, connect):
    """During a long read, no heartbeat of a live owner can be seen."""
    acquire()
    other = connect()
    other.fs.slow_read = 2
    with pytest.raises(RunError, match="still running"):
        acquire(storage=other)
