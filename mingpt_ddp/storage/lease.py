"""A lease on a URL: it allows only one process at a time to write to an object store.

Object stores do not have locks that end with their process, as flock does on a disk. The owner of a
lease therefore writes the file `owner.json` with its id and a counter, and increases the counter at
each heartbeat. Another process that finds this file polls it. If the counter changes, the owner is
alive. If it does not change for LEASE_TTL_S seconds, the lease is stale, and the process takes it
over. The clocks of different machines are never compared.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.storage.remote.remote import RemoteStorage

log = logging.getLogger(__name__)

OWNER = "owner.json"
HEARTBEAT_INTERVAL_S = 5.0
# A lease without a heartbeat for this long is stale. This is longer than a request with its
# retries.
LEASE_TTL_S = 60.0
# Several processes may take over a stale lease at the same time. After writing owner.json, each of
# them waits this long, then reads it again: the last writer has the lease.
TAKEOVER_GRACE_S = 1.0
MAX_RECORD_BYTES = 1 << 16


class Lease:
    """The exclusive right to write below a URL. A thread sends heartbeats until `release`."""

    def __init__(self, storage: RemoteStorage, dead_owner: str | None = None) -> None:
        """Acquire the lease.

        If an earlier owner may be alive, this takes LEASE_TTL_S seconds.

        Args:
            dead_owner: Id of an earlier owner that is known to be dead. Do not wait for it.

        Raises:
            LockedError: The owner of the lease is alive.
            StorageUnavailableError: The storage does not respond.
        """
        self.storage = storage
        self.id = uuid.uuid4().hex
        self._heartbeats_sent = 0
        # The next record that the owner before this process would write, if there was one. It may
        # still arrive although that owner has lost the lease: see `check`.
        self._late_record: dict[str, Any] | None = None
        # Description of the process that has taken over the lease, once one has.
        self._new_owner: str | None = None
        self._stopped = threading.Event()
        try:
            self._acquire(dead_owner)
        except OSError as error:
            raise StorageUnavailableError(f"cannot use {storage.url}: {error}") from error
        self._heartbeat = threading.Thread(target=self._heartbeat_loop, name="lease", daemon=True)
        self._heartbeat.start()

    def _acquire(self, dead_owner: str | None) -> None:
        owner = self._read()
        if owner is None and self.storage.put_if_absent(OWNER, self._record()):
            return
        # Read a damaged record again: another process may just be replacing it.
        owner = owner or self._read()
        self._late_record = _next_record(owner) if owner else None
        if owner is not None and (dead_owner is None or owner.get("id") != dead_owner):
            self._wait_until_stale(owner)
        self.storage.write(OWNER, self._record())
        time.sleep(TAKEOVER_GRACE_S)
        owner = self._read() or {}
        if owner.get("id") != self.id:
            raise LockedError(self.storage.url, _describe(owner))

    def _wait_until_stale(self, owner: dict[str, Any]) -> None:
        """Wait for LEASE_TTL_S seconds. Raise LockedError if the owner sends a heartbeat.

        Args:
            owner: The record of the owner.
        """
        log.info(
            "%s is locked by %s; waiting %.0f s for a heartbeat",
            self.storage.url,
            _describe(owner),
            LEASE_TTL_S,
        )
        silence = 0.0
        last_read = time.monotonic()
        while silence < LEASE_TTL_S:
            time.sleep(HEARTBEAT_INTERVAL_S / 4)
            current = self._read()
            if current is None:
                return
            if current != owner:
                raise LockedError(self.storage.url, _describe(current))
            # If a read is slow, the owner may be alive although its record has not changed. Each
            # read therefore counts as at most half an interval of silence.
            silence += min(time.monotonic() - last_read, HEARTBEAT_INTERVAL_S / 2)
            last_read = time.monotonic()

    def _record(self) -> bytes:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        # The length must not change, because RemoteStorage first asks for the size of the file, and
        # then reads as many bytes.
        heartbeat = f"{self._heartbeats_sent:015d}"
        return json.dumps({"id": self.id, "owner": owner, "heartbeat": heartbeat}).encode()

    def _read(self) -> dict[str, Any] | None:
        """Read the record of the owner. Return None if there is no owner, {} if it is damaged."""
        try:
            record = json.loads(self.storage.read(OWNER, limit=MAX_RECORD_BYTES))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _heartbeat_loop(self) -> None:
        while not self._stopped.wait(HEARTBEAT_INTERVAL_S) and self._new_owner is None:
            try:
                self.check()
                self._heartbeats_sent += 1
                self.storage.write(OWNER, self._record())
            except RunError as error:
                log.error("%s", error)
            except Exception as error:  # if the storage is unavailable, the next save reports it
                log.info(
                    "cannot send a heartbeat to %s: %s",
                    self.storage.url,
                    error,
                    extra={"file_only": True},
                )

    def check(self) -> None:
        """Check that this process still holds the lease.

        An old owner may have been suspended between this check and its heartbeat. When it wakes up,
        it sends this one heartbeat, although another process has taken over the lease. The new
        owner then writes its own record again, and the old owner ends when it reads that record.

        Raises:
            RunError: Another process has taken over the lease.
            OSError: The storage does not respond.
        """
        if self._new_owner is None:
            # Read a damaged record again: another process may just be replacing it.
            owner = self._read() or self._read()
            if owner is None or owner.get("id") == self.id:
                return
            if owner and owner == self._late_record:
                self.storage.write(OWNER, self._record())
                return
            self._new_owner = _describe(owner)
        raise RunError(
            f"{self.storage.url} was taken over by {self._new_owner}, because this run "
            "sent no heartbeats in time; if the other run should not go on, end it and run this "
            "command again"
        )

    def release(self) -> None:
        """Stop the heartbeats and delete owner.json.

        If the storage is too slow, the file remains, and the next owner must wait LEASE_TTL_S
        seconds.
        """
        self._stopped.set()
        thread = threading.Thread(target=self._delete, name="lease", daemon=True)
        thread.start()
        thread.join(HEARTBEAT_INTERVAL_S)

    def _delete(self) -> None:
        self._heartbeat.join()
        try:
            self.check()
            self.storage.delete(OWNER)
        except Exception as error:
            log.info("cannot release %s: %s", self.storage.url, error, extra={"file_only": True})


class LockedError(RunError):
    """Another process has locked a run directory or a URL, and is still running."""

    def __init__(
        self, location: object, owner: str, advice: str = "wait for it, or choose another run.name"
    ) -> None:
        super().__init__(f"{location} is locked by {owner}, which is still running; {advice}")
        self.location = location
        self.owner = owner


def _next_record(owner: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record that an owner will write at its next heartbeat.

    Return None if its current record is damaged.
    """
    try:
        return {**owner, "heartbeat": f"{int(owner['heartbeat']) + 1:015d}"}
    except (KeyError, TypeError, ValueError):
        return None


def _describe(owner: dict[str, Any]) -> str:
    """Describe an owner in a message, by its untrusted record."""
    return " ".join(str(owner.get("owner", "another process")).split())[:100]
