"""Failures of ranks: the store in which peers find the root cause."""

import hashlib
import json
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from mingpt_ddp.errors import MAY_PASS
from mingpt_ddp.process.error_text import without_addresses
from mingpt_ddp.process.job_store import ask_store, get_now

FIRST_FAILURE = "failure"  # key in the store: the error of the first rank that failed
# Keys in the store: the number of ranks that failed, also of those with the same error; and whether
# all ranks had the same one.
FAILED = "failed"
ARE_ALIKE = "failed/alike"
ALL_FAILED_TIMEOUT_S = 5.0  # within which all ranks hit an error that all ranks hit


@dataclass(frozen=True)
class RankFailure:
    """The error of the first rank that failed."""

    rank: int
    kind: str  # the class of a UserError; "" for any other error
    message: str  # one line

    @property
    def is_final(self) -> bool:
        """Whether a restart would fail too."""
        return self.kind not in ("", *(error.__name__ for error in MAY_PASS))


class Failures:
    """The error of the first rank that failed, in the store of the attempt."""

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        job_store: dist.Store | None = None,
    ) -> None:
        """
        Args:
            store: None: there is no other rank.
            job_store: outlives the attempt; None: nobody starts another one.
        """
        self.store = store
        self.job_store = job_store
        self.rank = rank
        self.world_size = world_size

    def record(self, message: str, kind: str = "") -> None:
        """Write the error of this rank to the store, unless another rank failed before.

        Args:
            kind: the class of a UserError; "" for any other error.
        """
        store = self.store
        if store is None:
            return
        failure = json.dumps(asdict(RankFailure(self.rank, kind, message)))
        ask_store(lambda: store.compare_set(FIRST_FAILURE, "", failure), otherwise=b"")

    def record_for_later(self, message: str) -> bool:
        """Record an error for later attempts; return whether a rank had it in an earlier one."""
        job_store = self.job_store
        if job_store is None:
            return False
        own_id = uuid.uuid4().hex

        def record() -> bool:
            attempt = self.store.compare_set("attempt", "", own_id) if self.store else b""
            attempt_id = attempt.decode() or own_id
            key = f"error/{without_addresses(message)}"
            return job_store.compare_set(key, "", attempt_id).decode() != attempt_id

        return ask_store(record, otherwise=False)

    def first(self, wait_s: float) -> RankFailure | None:
        """Return the error of the first failed rank, if it is reported within `wait_s` seconds."""
        store = self.store
        if store is None:
            return None
        deadline = time.monotonic() + wait_s

        def poll() -> RankFailure | None:
            while not store.check([FIRST_FAILURE]) and time.monotonic() < deadline:
                time.sleep(0.05)
            report = get_now(store, FIRST_FAILURE)
            return RankFailure(**json.loads(report)) if report else None

        return ask_store(poll, otherwise=None, wait_s=wait_s)

    def compare_with_all(self, message: str) -> bool:
        """Count this rank as failed; return whether every rank failed with the same error."""
        store = self.store
        if store is None:
            return True
        key = f"{FAILED}/{hashlib.sha256(message.encode()).hexdigest()}"

        def compare() -> bool:
            store.add(key, 1)
            if store.add(FAILED, 1) == self.world_size:
                are_alike = store.add(key, 0) == self.world_size
                store.set(ARE_ALIKE, str(are_alike))
            store.wait([ARE_ALIKE], timedelta(seconds=ALL_FAILED_TIMEOUT_S))
            return store.get(ARE_ALIKE) == b"True"

        return ask_store(compare, otherwise=False, wait_s=ALL_FAILED_TIMEOUT_S)
