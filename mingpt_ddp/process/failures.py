"""Record the failure of a rank in the job's key-value store, for the other ranks.

They look up the root cause there. After a failure, the launcher starts all ranks again: each start
is an attempt.
"""

import hashlib
import json
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from mingpt_ddp.errors import TRANSIENT_ERRORS
from mingpt_ddp.process.error_text import without_addresses
from mingpt_ddp.process.job_store import ask_store, get_now

# Keys in the store:
FIRST_FAILURE = "failure"  # the error of the first rank that failed
FAILED_COUNT = "failed"  # the number of ranks that failed; with a suffix, the number per error
ARE_ALIKE = "failed/alike"  # True if all ranks failed with the same error
# If an error occurs on all ranks, it occurs on all of them within this time.
ALL_FAILED_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RankFailure:
    """The error of the first rank that failed."""

    rank: int
    error_class: str  # name of the class of a UserError, or "" for any other error
    message: str  # one line

    @property
    def is_final(self) -> bool:
        """True if a restart would fail too."""
        return self.error_class not in ("", *(error.__name__ for error in TRANSIENT_ERRORS))


class Failures:
    """The failures of the ranks in one attempt, as recorded in the store."""

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        job_store: dist.Store | None = None,
    ) -> None:
        """
        Args:
            store: Store with the keys of this attempt. None if there is no other rank.
            job_store: Store that outlives the attempt. None if there will be no other attempt.
        """
        self.store = store
        self.job_store = job_store
        self.rank = rank
        self.world_size = world_size

    def record(self, message: str, error_class: str = "") -> None:
        """Write the error of this rank to the store, unless another rank has failed before.

        Args:
            message: The error in one line.
            error_class: Name of the class of a UserError, or "" for any other error.
        """
        store = self.store
        if store is None:
            return
        failure = json.dumps(asdict(RankFailure(self.rank, error_class, message)))
        ask_store(lambda: store.compare_set(FIRST_FAILURE, "", failure), otherwise=b"")

    def record_for_later(self, message: str) -> bool:
        """Record an error for later attempts.

        Return True if a rank has recorded the same error in an earlier attempt.
        """
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
        """Return the first recorded failure. Wait up to `wait_s` seconds if there is none yet."""
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
        """Count this rank as failed. Return True if every rank has failed with the same error."""
        store = self.store
        if store is None:
            return True
        key = f"{FAILED_COUNT}/{hashlib.sha256(message.encode()).hexdigest()}"

        def compare() -> bool:
            store.add(key, 1)
            if store.add(FAILED_COUNT, 1) == self.world_size:
                are_alike = store.add(key, 0) == self.world_size
                store.set(ARE_ALIKE, str(are_alike))
            store.wait([ARE_ALIKE], timedelta(seconds=ALL_FAILED_TIMEOUT_S))
            return store.get(ARE_ALIKE) == b"True"

        return ask_store(compare, otherwise=False, wait_s=ALL_FAILED_TIMEOUT_S)
