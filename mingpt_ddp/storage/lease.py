"""One writer per place in an object store, where there is no lock that ends with its holder.

The owner writes an object with its id and a counter, and counts on. Who finds such an object watches it: a counter that
moves belongs to someone alive, one that stands still to someone dead. No clocks are compared.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.storage.storage import Storage

log = logging.getLogger(__name__)

OWNER = "owner.json"
HEARTBEAT_INTERVAL_S = 5.0  # between two counts
LEASE_TTL_S = 60.0  # without a count, which may take as long as a request that has to be repeated
TAKEOVER_GRACE_S = 1.0  # after which the last of several that took the place at the same time has it
SMALL = 1 << 16  # bytes


class Lease:
    """The right to write below a URL, for as long as this process counts."""

    def __init__(self, storage: Storage, dead: str | None = None) -> None:
        """Become the owner; takes LEASE_TTL_S seconds where an earlier owner may be alive.

        Args:
            dead: the id of an earlier owner that is known to be.

        Raises:
            RunError: the owner is alive.
            StorageUnavailableError: the storage does not answer.
        """
        self.storage = storage
        self.id = uuid.uuid4().hex
        self._beat = 0
        self._lost_to: str | None = None
        self._stopped = threading.Event()
        try:
            self._take(dead)
        except OSError as error:
            raise StorageUnavailableError(f"cannot use {storage.url}: {error}") from error
        self._counting = threading.Thread(target=self._heartbeat_loop, name="lease", daemon=True)
        self._counting.start()

    def _take(self, dead: str | None) -> None:
        owner = self._read()
        if owner is None and self.storage.put_if_absent(OWNER, self._record()):
            return
        owner = owner or self._read()
        if owner is not None and owner.get("id") != dead:
            self._wait_until_stale(owner)
        self.storage.write(OWNER, self._record())
        time.sleep(TAKEOVER_GRACE_S)
        taken = self._read()
        if taken is None or taken.get("id") != self.id:
            raise self._refusal(taken or {})

    def _wait_until_stale(self, owner: dict[str, Any]) -> None:
        log.info("%s belongs to %s; waiting %.0f s for a sign of life", self.storage.url, _who(owner), LEASE_TTL_S)
        still, seen = 0.0, time.monotonic()
        while still < LEASE_TTL_S:
            time.sleep(HEARTBEAT_INTERVAL_S / 4)
            now = self._read()
            if now is None:
                return
            if now != owner:
                raise self._refusal(now)
            still += min(
                time.monotonic() - seen, HEARTBEAT_INTERVAL_S / 2
            )  # a storage that does not answer shows nothing
            seen = time.monotonic()

    def _refusal(self, owner: dict[str, Any]) -> RunError:
        return RunError(
            f"{self.storage.url} belongs to {_who(owner)}, which is still running; wait for it, "
            "or choose another run.name"
        )

    def _record(self) -> bytes:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"id": self.id, "owner": who, "beat": self._beat}).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            record = json.loads(self.storage.read(OWNER, limit=SMALL))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            record = None
        return record if isinstance(record, dict) else {}

    def _heartbeat_loop(self) -> None:
        while not self._stopped.wait(HEARTBEAT_INTERVAL_S) and self._lost_to is None:
            try:
                self.check()
                self._beat += 1
                self.storage.write(OWNER, self._record())
            except RunError as error:
                log.error("%s", error)
            except Exception as error:  # the storage is away: the next snapshot tells
                log.info("no sign of life at %s: %s", self.storage.url, error, extra={"file_only": True})

    def check(self) -> None:
        """
        Raises:
            RunError: another process has taken the place over.
            OSError: the storage does not answer.
        """
        if self._lost_to is None:
            owner = self._read()
            if owner is not None and owner.get("id") != self.id:
                self._lost_to = _who(owner)
        if self._lost_to is not None:
            raise RunError(f"{self.storage.url} was taken over by {self._lost_to}, because this run seemed to be dead")

    def release(self) -> None:
        """Leave the place to whoever comes next; if the storage does not answer soon, they wait for a sign of life."""
        self._stopped.set()
        leaving = threading.Thread(target=self._leave, name="lease", daemon=True)
        leaving.start()
        leaving.join(HEARTBEAT_INTERVAL_S)

    def _leave(self) -> None:
        self._counting.join()
        try:
            self.check()
            self.storage.delete(OWNER)
        except Exception as error:
            log.info("cannot release %s: %s", self.storage.url, error, extra={"file_only": True})


def _who(owner: dict[str, Any]) -> str:
    return " ".join(str(owner.get("owner", "another process")).split())[:100]
