"""One owner per place in an object store; memory:// stands in for it, which `Lease` cannot tell."""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.storage import lease as module
from mingpt_ddp.storage.lease import OWNER, Lease
from mingpt_ddp.storage.storage import Storage, StorageError

HEARTBEAT_INTERVAL_S, LEASE_TTL_S, TAKEOVER_GRACE_S = 0.05, 0.4, 0.1


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    for name, value in (
        ("HEARTBEAT_INTERVAL_S", HEARTBEAT_INTERVAL_S),
        ("LEASE_TTL_S", LEASE_TTL_S),
        ("TAKEOVER_GRACE_S", TAKEOVER_GRACE_S),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def place():
    return Storage(f"memory://lease-{uuid.uuid4().hex}")


@pytest.fixture
def take(place):
    """Make leases that end with the test."""
    taken: list[Lease] = []

    def take(storage=place, dead=None) -> Lease:
        taken.append(Lease(storage, dead))
        return taken[-1]

    yield take
    for lease in taken:
        lease._stopped.set()


def owner(place) -> dict:
    return json.loads(place.read(OWNER))


def die(lease: Lease) -> None:
    """As with kill -9: no more counts, and the object stays."""
    lease._stopped.set()
    time.sleep(2 * HEARTBEAT_INTERVAL_S)


def leave(place, **record) -> None:
    place.write(OWNER, json.dumps(record).encode())


def test_free_place_is_taken_at_once(place, take):
    begin = time.monotonic()
    lease = take()
    assert time.monotonic() - begin < LEASE_TTL_S / 2
    assert owner(place)["id"] == lease.id
    lease.check()


def test_the_owner_counts(place, take):
    take()
    first = owner(place)["beat"]
    time.sleep(6 * HEARTBEAT_INTERVAL_S)
    assert owner(place)["beat"] > first


def test_a_living_owner_is_respected_and_named(place, take):
    lease = take()
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"belongs to process \d+ on .*still running.*run\.name"):
        take()
    assert time.monotonic() - begin < LEASE_TTL_S, "one count is enough of a sign"
    lease.check()
    assert owner(place)["id"] == lease.id


def test_a_dead_owner_is_succeeded(place, take):
    old = take()
    die(old)
    begin = time.monotonic()
    new = take()
    assert time.monotonic() - begin >= LEASE_TTL_S
    assert owner(place)["id"] == new.id
    new.check()


def test_an_owner_known_to_be_dead_is_not_waited_for(place, take):
    old = take()
    die(old)
    begin = time.monotonic()
    new = take(dead=old.id)
    assert time.monotonic() - begin < LEASE_TTL_S
    assert owner(place)["id"] == new.id


def test_knowing_of_another_dead_does_not_help(place, take):
    take()
    with pytest.raises(RunError, match="still running"):
        take(dead="somebody else")


def test_who_was_succeeded_hears_of_it(place, take):
    """It was only slow, or asleep, and comes back."""
    old = take()
    die(old)
    new = take()
    with pytest.raises(RunError, match=r"was taken over by process \d+ on"):
        old.check()
    old.release()
    assert owner(place)["id"] == new.id, "it released what is not its own"
    new.check()


def test_who_was_succeeded_stops_counting(place, take):
    old = take()
    leave(place, id="another", owner="process 1 on elsewhere", beat=0)
    time.sleep(6 * HEARTBEAT_INTERVAL_S)
    assert owner(place) == {"id": "another", "owner": "process 1 on elsewhere", "beat": 0}
    for _ in range(2):
        with pytest.raises(RunError, match="was taken over by process 1 on elsewhere"):
            old.check()


def test_loss_is_not_forgotten_when_the_other_leaves(place, take):
    old = take()
    leave(place, id="another", owner="process 1 on elsewhere", beat=0)
    time.sleep(4 * HEARTBEAT_INTERVAL_S)
    place.delete(OWNER)
    with pytest.raises(RunError, match="taken over"):
        old.check()


def test_released_place_is_free(place, take):
    take().release()
    assert place.size(OWNER) is None
    begin = time.monotonic()
    take()
    assert time.monotonic() - begin < LEASE_TTL_S / 2


def test_release_while_another_waits(place, take):
    """Who waits for a sign of life takes over what is released in the meantime."""
    lease = take()
    die(lease)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take)
        time.sleep(LEASE_TTL_S / 4)
        lease.release()
        new = waiting.result(timeout=10)
    assert owner(place)["id"] == new.id


@pytest.mark.parametrize("before", ["free", "dead", "dead and known"])
def test_of_several_takers_one_wins(place, take, before):
    dead = None
    if before != "free":
        old = take()
        die(old)
        dead = old.id if before == "dead and known" else None
    start = threading.Barrier(4)

    def attempt(_):
        start.wait()
        try:
            return take(Storage(place.url), dead)
        except RunError:
            return None

    with ThreadPoolExecutor(4) as pool:
        winners = [lease for lease in pool.map(attempt, range(4)) if lease is not None]
    assert len(winners) == 1
    winners[0].check()
    assert owner(place)["id"] == winners[0].id


def test_clocks_are_not_compared(place, take, monkeypatch):
    """Another machine's calendar may say anything."""
    take()
    for wrong in (0.0, 4e9):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda wrong=wrong: wrong)
            with pytest.raises(RunError, match="still running"):
                take()
    assert not {"time", "at", "date"} & owner(place).keys()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null", b'{"id": 3, "owner": ["x"]}', b"[" * 9999])
def test_a_damaged_record_belongs_to_nobody_alive(place, take, content):
    place.write(OWNER, content)
    lease = take()
    assert owner(place)["id"] == lease.id


def test_a_record_cannot_write_to_the_terminal(place, take):
    stop = threading.Event()

    def count():
        beat = 0
        while not stop.wait(HEARTBEAT_INTERVAL_S):
            beat += 1
            leave(place, id="x", owner="a\nb\x1b[31m" + "c" * 999, beat=beat)

    leave(place, id="x", owner="a", beat=-1)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(RunError) as caught:
            take()
    finally:
        stop.set()
        thread.join()
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_an_owner_outlives_a_store_that_is_away(place, take, monkeypatch):
    lease = take()
    away = threading.Event()
    away.set()
    for name in ("read", "write"):
        method = getattr(place, name)

        def broken(*args, method=method, **kwargs):
            if away.is_set():
                raise StorageError("the store is away")
            return method(*args, **kwargs)

        monkeypatch.setattr(place, name, broken)
    time.sleep(4 * HEARTBEAT_INTERVAL_S)
    with pytest.raises(StorageError):
        lease.check()
    away.clear()
    before = owner(Storage(place.url))["beat"]
    time.sleep(6 * HEARTBEAT_INTERVAL_S)
    lease.check()
    assert owner(place)["beat"] > before


def test_a_store_that_is_away_is_no_reason_to_take_over(place, take, monkeypatch):
    take()
    other = Storage(place.url)

    def broken(*args, **kwargs):
        raise StorageError("the store is away")

    monkeypatch.setattr(other, "read", broken)
    with pytest.raises(StorageUnavailableError, match=f"cannot use {place.url}: the store is away"):
        take(other)


def test_release_while_the_store_is_away_does_not_raise(place, take, monkeypatch):
    lease = take()

    def broken(*args, **kwargs):
        raise StorageError("the store is away")

    monkeypatch.setattr(place, "read", broken)
    lease.release()


def test_release_ends_the_thread(place, take):
    lease = take()
    lease.release()
    time.sleep(3 * HEARTBEAT_INTERVAL_S)
    assert place.size(OWNER) is None, "a last count brought the object back"


def test_an_answer_that_comes_late_is_no_sign_of_death(place, take, monkeypatch):
    """The store takes longer over one read than LEASE_TTL_S: the owner could not be seen counting, but it does."""
    take()
    other = Storage(place.url)
    read = other.read
    slow = iter([0.0, 2 * LEASE_TTL_S])

    def sluggish(*args, **kwargs):
        content = read(*args, **kwargs)  # as it is now
        time.sleep(next(slow, 0.0))
        return content

    monkeypatch.setattr(other, "read", sluggish)
    with pytest.raises(RunError, match="still running"):
        take(other)
