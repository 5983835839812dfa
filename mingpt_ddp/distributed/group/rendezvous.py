"""The rendezvous: how the ranks of one attempt find each other in a key-value store.

An attempt is one start of all ranks of a run.

The launcher's store outlives the workers: after a restart it still holds the addresses of dead
processes. Therefore every process writes a fresh id. Rank zero sends an invitation to each id that
it finds, and the process with this id confirms it. A dead process cannot confirm. Once one process
of each rank has confirmed, rank zero starts the attempt. The keys of its process group are prefixed
with rank zero's id, which is unique to the attempt.

To keep the load on the store small, rank zero reads only one key of each rank, and the other ranks
read only keys that rank zero writes for them.
"""

import time
import uuid
from collections.abc import Iterable

from torch.distributed import PrefixStore, Store

from mingpt_ddp.errors import JoinError, RunError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.job_store import (
    POLL_S,
    STORE_TIMEOUT_S,
    call_with_timeout,
    get_now,
    open_store,
    raise_if_fatal,
)

# After this share of ddp.timeout_s, an error names the rank that is missing or hangs. Torch's own
# error would come after the whole timeout, and would not name the rank.
TIMEOUT_FRACTION = 0.8
LONGEST_PAUSE_S = 0.25  # longest pause between two looks at the store
STORE_CALL_S = 5e-5  # time that the store takes to answer a call
# A late process watches the store this long to find out if rank zero is joining.
WATCH_RANK_ZERO_S = 1.0
# A process that is joining confirms an invitation within this time, even if it is just watching.
CONFIRM_S = 2.0
RANK_ZERO_COUNTER = "starter"  # key of a counter that rank zero increases while it joins
REFUSED = "!"  # first character of a refusal, which rank zero sends instead of an invitation


def join(env: DistEnv, job: int, timeout_s: float) -> tuple[Store, Store | None]:
    """Connect to the job's store, and wait there for the other ranks of this attempt.

    Returns:
        The store of the job, and a store with a prefix for the attempt (None for a single rank).

    Raises:
        RunError: The store cannot be reached, or an earlier attempt failed with a fatal error.
        JoinError: A rank did not join within TIMEOUT_FRACTION of `timeout_s` seconds.
    """
    limit_s = TIMEOUT_FRACTION * timeout_s

    def connect_to_job() -> Store:
        store = open_store(env, job, limit_s)
        raise_if_fatal(store)
        return store

    try:
        store = call_with_timeout(connect_to_job, limit_s + STORE_TIMEOUT_S)
        if env.world_size == 1:
            return store, None
        # Rank zero may begin just before another rank would give up. Both then wait for up to
        # `limit_s` more seconds.
        return store, call_with_timeout(
            lambda: join_attempt(store, env, limit_s), 2 * limit_s + STORE_TIMEOUT_S
        )
    except TimeoutError as error:
        host, port = env.master_address
        raise JoinError(
            f"rank {env.rank}: the store at {host}:{port} does not respond; "
            "check that its host is running"
        ) from error


def join_attempt(store: Store, env: DistEnv, limit_s: float) -> Store:
    """Wait for the other ranks of this attempt. Return a store with a prefix for the attempt.

    Raises:
        JoinError: A rank did not join within `limit_s` seconds. The message names it.
    """
    joining = _Joining(store, env, limit_s)
    attempt = joining.start() if env.is_rank_zero else joining.wait_for_start()
    return PrefixStore(f"attempt/{attempt}", store)


class _Joining:
    """A rank that joins an attempt."""

    def __init__(self, store: Store, env: DistEnv, limit_s: float) -> None:
        self.store = store
        self.env = env
        self.id = uuid.uuid4().hex[:16]  # short, because it is a prefix of many keys
        self.began_at = time.monotonic()
        self.limit_s = limit_s
        store.set(f"hello/{env.rank}", self.id)

    def start(self) -> str:
        """On rank zero, invite processes until one of each rank has confirmed.

        Return the id of rank zero, which is the name of the attempt.
        """
        hellos = [f"hello/{rank}" for rank in range(1, self.env.world_size)]
        invited: set[str] = set()  # ids, some of which may belong to dead processes
        while True:
            self.store.add(RANK_ZERO_COUNTER, 1)
            is_late = self._is_late()
            answers = self._read(hellos, is_late)
            ids = [answer.partition(" ")[0] for answer in answers]
            missing = []
            for rank, answer in enumerate(answers, start=1):
                if not answer.endswith(f" {self.id}"):
                    missing.append(rank)
            if not missing:
                self._send("go", ids, self.id)
                return self.id
            new = {*ids} - invited - {""}
            self._send("invite", new, self.id)
            invited |= new
            if not is_late:
                self._pause()
            elif new:
                # Give the new processes time to confirm. Meanwhile, show that rank zero is alive.
                for _ in range(4):
                    time.sleep(CONFIRM_S / 4)
                    self.store.add(RANK_ZERO_COUNTER, 1)
            else:
                error = _missing_error(", ".join(map(str, missing)))
                self._send("invite", invited, f"{REFUSED}{error.args[0]}")
                raise error

    def wait_for_start(self) -> str:
        """On any other rank, confirm invitations until rank zero starts the attempt.

        Return the name of the attempt, which is the id of rank zero. There may be a second
        invitation if another process takes over as rank zero.
        """
        attempt = ""
        while True:
            invitation = get_now(self.store, f"invite/{self.id}")
            if invitation.startswith(REFUSED):
                raise JoinError(invitation.removeprefix(REFUSED))
            if invitation != attempt:
                attempt = invitation
                self.store.set(f"hello/{self.env.rank}", f"{self.id} {attempt}")
            if attempt and get_now(self.store, f"go/{self.id}") == attempt:
                return attempt
            self._pause()
            if self._is_late() and not self._is_starting(attempt):
                self.store.set(f"hello/{self.env.rank}", "")  # this process leaves
                raise _missing_error("0")

    def _read(self, hellos: list[str], is_late: bool) -> list[str]:
        """Read the hello of each rank: its id, followed by rank zero's id once it has confirmed.

        A missing hello is read as "". To spare the store, no hello is read before all of them are
        there, unless the time to join is over. Until then, this method returns "" for every rank.
        """
        if self.store.check(hellos):
            return [value.decode() for value in self.store.multi_get(hellos)]
        return [get_now(self.store, hello) if is_late else "" for hello in hellos]

    def _send(self, what: str, ids: Iterable[str], value: str) -> None:
        for each in ids:
            self.store.set(f"{what}/{each}", value)

    def _pause(self) -> None:
        """Wait a moment, so that all ranks together do not overload the store.

        A pause is a fraction of the time so far, so it delays the join by at most that fraction.

        Raises:
            RunError: An earlier attempt failed with a fatal error.
        """
        elapsed_s = time.monotonic() - self.began_at
        shortest_s = max(POLL_S, self.env.world_size * STORE_CALL_S)
        time.sleep(min(max(shortest_s, elapsed_s / 20), LONGEST_PAUSE_S))
        raise_if_fatal(self.store)

    def _is_late(self) -> bool:
        """Return True if the time to join is over.

        Raises:
            RunError: Another process has joined as this rank.
        """
        if time.monotonic() - self.began_at < self.limit_s:
            return False
        # Before this time, a different id is not an error: a restarted process may have replaced
        # this one.
        if not get_now(self.store, f"hello/{self.env.rank}").startswith(self.id):
            raise RunError(
                f"another process also has RANK={self.env.rank}; give every process its own rank"
            )
        return True

    def _is_starting(self, attempt: str) -> bool:
        """Return True if rank zero is joining too. It will then start, or name the missing ranks.

        Args:
            attempt: The last invitation that this process has received.
        """
        before = get_now(self.store, RANK_ZERO_COUNTER)
        time.sleep(WATCH_RANK_ZERO_S)
        is_invited = get_now(self.store, f"invite/{self.id}") != attempt
        return is_invited or get_now(self.store, RANK_ZERO_COUNTER) != before


def _missing_error(ranks: str) -> JoinError:
    return JoinError(f"rank {ranks} did not join in time; start all ranks, or raise ddp.timeout_s")
