"""One writer at a time in an object store; memory:// stands in for it."""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from launching import wait_for

from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.storage import lease as module
from mingpt_ddp.storage.lease import OWNER, Lease
from mingpt_ddp.storage.remote.remote_errors import StorageError
from mingpt_ddp.storage.urls import open_storage

HEARTBEAT_INTERVAL_S = 0.05
SHORT_TTL_S = 0.4
TAKEOVER_GRACE_S = 0.1


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Shorten the waits, but not LEASE_TTL_S: on a busy machine a live owner may be slow."""
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", HEARTBEAT_INTERVAL_S)
    monkeypatch.setattr(module, "TAKEOVER_GRACE_S", TAKEOVER_GRACE_S)


@pytest.fixture
def short_ttl(monkeypatch):
    """Let a lease without heartbeats be stale after SHORT_TTL_S. Its owner must be dead."""
    monkeypatch.setattr(module, "LEASE_TTL_S", SHORT_TTL_S)


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """The seconds that each wait of an acquisition was to take, however long it took."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return waits


@pytest.fixture
def storage():
    return open_storage(f"memory://lease-{uuid.uuid4().hex}")


@pytest.fixture
def acquire(storage):
    """Acquire leases that end with the test."""
    taken: list[Lease] = []

    def acquire(storage=storage, dead=None) -> Lease:
        taken.append(Lease(storage, dead))
        return taken[-1]

    yield acquire
    for lease in taken:
        lease._stopped.set()


def owner(storage) -> dict:
    return json.loads(storage.read(OWNER))


def stop_heartbeats(lease: Lease) -> None:
    """Stop the heartbeats and keep the object, as SIGKILL does."""
    lease._stopped.set()
    lease._heartbeat.join()


def write_record(storage, **record) -> None:
    storage.write(OWNER, json.dumps(record).encode())


def test_a_free_lease_is_acquired_at_once(storage, acquire, slept):
    lease = acquire()
    assert sum(slept) <= TAKEOVER_GRACE_S
    assert owner(storage)["id"] == lease.id
    lease.check()


def test_the_owner_sends_heartbeats(storage, acquire):
    acquire()
    first = owner(storage)["heartbeat"]
    wait_for(lambda: owner(storage)["heartbeat"] > first, what="a heartbeat")


def test_a_record_keeps_its_length(storage, acquire):
    """A reader asks for the size and then for that many bytes, and a heartbeat may come between."""
    lease = acquire()
    stop_heartbeats(lease)
    lengths = set()
    for lease._count in (0, 9, 10, 10**9):
        lengths.add(len(lease._record()))
    assert len(lengths) == 1


def test_a_record_that_is_damaged_for_a_moment_is_no_takeover(storage, acquire, monkeypatch):
    lease = acquire()
    stop_heartbeats(lease)
    read, cut = storage.read, iter([-1])
    monkeypatch.setattr(
        storage, "read", lambda *args, **kwargs: read(*args, **kwargs)[: next(cut, None)]
    )
    lease.check()
    assert next(cut, None) is None
    monkeypatch.setattr(storage, "read", lambda *args, **kwargs: b"{")
    with pytest.raises(RunError, match="was taken over by another process"):
        lease.check()


def test_a_live_owner_keeps_the_lease_when_its_record_is_damaged_for_a_moment(
    storage, acquire, monkeypatch
):
    """As a reader sees it while a store replaces the record."""
    lease = acquire()
    read, cut = storage.read, iter([-1])
    monkeypatch.setattr(
        storage, "read", lambda *args, **kwargs: read(*args, **kwargs)[: next(cut, None)]
    )
    with pytest.raises(RunError, match="still running"):
        Lease(storage)
    lease.check()
    assert owner(storage)["id"] == lease.id


def test_a_live_owner_keeps_the_lease_and_is_named(storage, acquire):
    lease = acquire()
    with pytest.raises(RunError, match=r"is locked by process \d+ on .*still running.*run\.name"):
        acquire()
    lease.check()
    assert owner(storage)["id"] == lease.id


def test_a_stale_lease_is_taken_over(short_ttl, storage, acquire):
    old = acquire()
    stop_heartbeats(old)
    begin = time.monotonic()
    new = acquire()
    assert time.monotonic() - begin >= SHORT_TTL_S
    assert owner(storage)["id"] == new.id
    new.check()


def test_an_owner_known_to_be_dead_is_not_waited_for(storage, acquire, slept):
    old = acquire()
    stop_heartbeats(old)
    new = acquire(dead=old.id)
    assert sum(slept) <= TAKEOVER_GRACE_S
    assert owner(storage)["id"] == new.id


def test_another_dead_owner_is_ignored(storage, acquire):
    acquire()
    with pytest.raises(RunError, match="still running"):
        acquire(dead="somebody else")


def test_an_owner_notices_a_takeover(short_ttl, storage, acquire):
    """The owner was only slow or suspended, and continues."""
    old = acquire()
    stop_heartbeats(old)
    new = acquire()
    with pytest.raises(RunError, match=r"was taken over by process \d+ on"):
        old.check()
    old.release()
    assert owner(storage)["id"] == new.id, "it released the lease of another process"
    new.check()


def test_no_heartbeat_after_a_takeover(storage, acquire):
    old = acquire()
    write_record(storage, id="another", owner="process 1 on elsewhere", heartbeat=0)
    time.sleep(6 * HEARTBEAT_INTERVAL_S)
    assert owner(storage) == {"id": "another", "owner": "process 1 on elsewhere", "heartbeat": 0}
    for _ in range(2):
        with pytest.raises(RunError, match="was taken over by process 1 on elsewhere"):
            old.check()


def test_a_takeover_is_final_after_the_new_owner_has_released(storage, acquire):
    old = acquire()
    write_record(storage, id="another", owner="process 1 on elsewhere", heartbeat=0)
    time.sleep(4 * HEARTBEAT_INTERVAL_S)
    storage.delete(OWNER)
    with pytest.raises(RunError, match="taken over"):
        old.check()


def test_a_released_lease_is_free(storage, acquire, slept):
    acquire().release()
    wait_for(lambda: storage.size(OWNER) is None, what="the release")
    acquire()
    assert sum(slept) <= TAKEOVER_GRACE_S


def test_release_while_another_waits(storage, acquire, slept):
    """A process that waits for a heartbeat acquires a lease that is released meanwhile."""
    lease = acquire()
    stop_heartbeats(lease)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acquire)
        wait_for(lambda: slept, what="the wait for a heartbeat")
        lease.release()
        new = waiting.result()
    assert owner(storage)["id"] == new.id


@pytest.mark.parametrize("before", ["free", "dead", "dead and known"])
def test_of_several_processes_one_acquires(short_ttl, storage, acquire, before, monkeypatch):
    # longer than a busy machine may suspend one of the threads before it writes
    monkeypatch.setattr(module, "TAKEOVER_GRACE_S", 2.0)
    dead = None
    if before != "free":
        old = acquire()
        stop_heartbeats(old)
        dead = old.id if before == "dead and known" else None
    start = threading.Barrier(4)

    def attempt(_):
        start.wait()
        try:
            return acquire(open_storage(storage.url), dead)
        except RunError:
            return None

    with ThreadPoolExecutor(4) as pool:
        winners = [lease for lease in pool.map(attempt, range(4)) if lease is not None]
    assert len(winners) == 1
    winners[0].check()
    assert owner(storage)["id"] == winners[0].id


def test_clocks_are_not_compared(storage, acquire, monkeypatch):
    """The clock of another machine may be wrong by years."""
    acquire()
    for wrong in (0.0, 4e9):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda wrong=wrong: wrong)
            with pytest.raises(RunError, match="still running"):
                acquire()
    assert not {"time", "at", "date"} & owner(storage).keys()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"null", b'{"id": 3, "owner": ["x"]}', b"[" * 9999]
)
def test_a_damaged_record_has_no_live_owner(short_ttl, storage, acquire, content):
    """Only if it stays damaged: its owner may be replacing it."""
    storage.write(OWNER, content)
    begin = time.monotonic()
    lease = acquire()
    assert time.monotonic() - begin >= SHORT_TTL_S
    assert owner(storage)["id"] == lease.id


def test_an_owner_whose_damaged_record_becomes_readable_is_alive(storage, slept):
    storage.write(OWNER, b"{")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lease, storage)
        wait_for(lambda: len(slept) > 2, what="a third look at the record")
        write_record(storage, id="x", owner="process 1 on elsewhere")
        with pytest.raises(RunError, match="locked by process 1 on elsewhere, which is still"):
            waiting.result()
    assert owner(storage)["id"] == "x"


def test_control_characters_of_a_record_are_not_printed(storage, acquire):
    stop = threading.Event()

    def continue_heartbeats():
        beat = 0
        while not stop.wait(HEARTBEAT_INTERVAL_S):
            beat += 1
            write_record(storage, id="x", owner="a\nb\x1b[31m" + "c" * 999, beat=beat)

    write_record(storage, id="x", owner="a", beat=-1)
    thread = threading.Thread(target=continue_heartbeats)
    thread.start()
    try:
        with pytest.raises(RunError) as caught:
            acquire()
    finally:
        stop.set()
        thread.join()
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_an_owner_survives_an_outage_of_the_store(storage, acquire, monkeypatch):
    lease = acquire()
    down = threading.Event()
    down.set()
    for name in ("read", "write"):
        method = getattr(storage, name)

        def broken(*args, method=method, **kwargs):
            if down.is_set():
                raise StorageError("the store is down")
            return method(*args, **kwargs)

        monkeypatch.setattr(storage, name, broken)
    time.sleep(4 * HEARTBEAT_INTERVAL_S)
    with pytest.raises(StorageError):
        lease.check()
    down.clear()
    before = owner(open_storage(storage.url))["heartbeat"]
    wait_for(lambda: owner(storage)["heartbeat"] > before, what="a heartbeat")
    lease.check()


def test_no_takeover_during_an_outage(storage, acquire, monkeypatch):
    acquire()
    other = open_storage(storage.url)

    def broken(*args, **kwargs):
        raise StorageError("the store is down")

    monkeypatch.setattr(other, "read", broken)
    with pytest.raises(
        StorageUnavailableError, match=f"cannot use {storage.url}: the store is down"
    ):
        acquire(other)


def test_release_during_an_outage_does_not_raise(storage, acquire, monkeypatch):
    lease = acquire()

    def broken(*args, **kwargs):
        raise StorageError("the store is down")

    monkeypatch.setattr(storage, "read", broken)
    lease.release()


def test_release_ends_the_thread(storage, acquire):
    lease = acquire()
    lease.release()
    wait_for(lambda: storage.size(OWNER) is None, what="the release")
    time.sleep(3 * HEARTBEAT_INTERVAL_S)
    assert storage.size(OWNER) is None, "a last heartbeat wrote the object again"


def test_a_slow_read_does_not_make_a_lease_stale(short_ttl, storage, acquire, monkeypatch):
    """A read takes longer than SHORT_TTL_S: no heartbeat could be seen of a live owner."""
    acquire()
    other = open_storage(storage.url)
    read = other.read
    slow = iter([0.0, 2 * SHORT_TTL_S])

    def slow_read(*args, **kwargs):
        content = read(*args, **kwargs)  # as it is now
        time.sleep(next(slow, 0.0))
        return content

    monkeypatch.setattr(other, "read", slow_read)
    with pytest.raises(RunError, match="still running"):
        acquire(other)
