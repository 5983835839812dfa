"""The ranks of one attempt: how they join, what they tell each other, and how a failure is told.

In one process every collective is the identity, so that nobody else has to ask how many ranks there are.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt_ddp import errors
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.rendezvous import call_with_timeout, connect, join_attempt, raise_if_fatal
from mingpt_ddp.distributed.shared_memory import SharedMemoryGroup
from mingpt_ddp.errors import UserError

T = TypeVar("T")
FAILURE = "failure"  # the store's key of what the first rank to fail met
ANSWER_S = 5.0  # that the store may take on a busy machine
ALL_FAILED_S = 5.0  # within which ranks that meet the same error do so


@dataclass(frozen=True)
class Heartbeat:
    """Where the thread that trains is; `watch` finds out who keeps the others waiting."""

    count: int  # grows whenever it gets on
    what: str
    waiting: bool  # for other ranks


def _serialize_error(error: Exception) -> tuple[str, str]:
    """The kind of an error and its message, on the way to other ranks; what is no UserError travels as an OSError."""
    if isinstance(error, UserError):
        return type(error).__name__, str(error.args[0])
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return "OSError", " ".join(told.split())


def _deserialize_error(packed: tuple[str, str], where: str = "") -> Exception:
    """The error that another rank has packed; an OSError says `where` it was."""
    kind, message = packed
    if kind == "OSError":
        return OSError(f"{where}{message}")
    error: UserError = getattr(errors, kind)(message)
    return error


class RaiseEverywhere:
    """A context in which all ranks fail if one does; see ProcessGroup.raise_everywhere."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        errors = self.group.all_gather(_serialize_error(error) if error else None, io=True)
        for rank, packed in enumerate(errors):
            if packed is not None:
                where = "" if self.group.world_size == 1 else f"rank {rank}: "
                raise _deserialize_error(packed, where) from error


class ProcessGroup:
    """All ranks of the job, as seen from one of them."""

    def __init__(self, env: DistEnv, backend: str, timeout_s: float, job: int) -> None:
        """Join the process group of this attempt.

        Args:
            backend: as torch.distributed names it.
            timeout_s: how long a rank waits for the others, in seconds.
            job: the number of the job in a sweep; every job has a process group of its own.
        """
        self.env, self.timeout_s = env, timeout_s
        self.rank, self.world_size, self.is_rank_zero = env.rank, env.world_size, env.is_rank_zero
        self.store: dist.Store | None = None  # of this attempt
        self._job_store: dist.Store | None = None  # of all attempts under one agent
        self._io_group: dist.ProcessGroup | None = None  # for one thread beside the one that trains
        self.shared_memory: SharedMemoryGroup | None = (
            None  # where all ranks are on one machine and nothing else is wanted
        )
        self.heartbeat = Heartbeat(0, "starting", waiting=False)
        if self.world_size > 1 or env.has_agent:  # a worker whose agent is gone already finds no store
            self._job_store = connect(env, job, timeout_s)
            raise_if_fatal(self._job_store)
        if self.world_size > 1:
            self._join(self._job_store, backend)

    def _join(self, job_store: dist.Store | None, backend: str) -> None:
        assert job_store is not None
        self.store = join_attempt(job_store, self.env, self.timeout_s)
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        # Whoever uses it may wait for a storage that is away; that a rank has died it notices all the same.
        self._io_group = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    def close(self) -> None:
        """Leave the process group together: a rank that goes early would stall a launcher's exit."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
        if self.shared_memory is not None:
            self.shared_memory.close()

    def have_all_failed(self, message: str) -> bool:
        """Whether every rank has met the same error; then this attempt is over, and all may begin another together."""
        if self.world_size > 1:
            assert self.store is not None
            store = self.store
            keys = [f"failed/{rank}" for rank in range(self.world_size)]
            try:
                call_with_timeout(ANSWER_S, lambda: store.set(keys[self.rank], message))
                call_with_timeout(ALL_FAILED_S + ANSWER_S, lambda: store.wait(keys, timedelta(seconds=ALL_FAILED_S)))
                if any(store.get(key).decode() != message for key in keys):
                    return False
            except Exception:  # another rank has not failed, or cannot say so
                return False
            dist.destroy_process_group()
        return True

    # Small control data travels as JSON in CPU tensors: torch's object collectives would unpickle it.

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, values: Tensor) -> Tensor:
        """The element-wise sum over all ranks of a CPU tensor, in place."""
        if self.world_size > 1:
            with self._blocked():
                dist.all_reduce(values)
        return values

    def all_gather_async(self, values: Tensor) -> Callable[[], Tensor]:
        """A CPU tensor (n) of every rank as (world size, n), under way until the function returned is called."""
        if self.world_size == 1:
            return lambda: values[None]
        if self.shared_memory is not None:
            return self._shared_memory_all_gather(self.shared_memory, values)
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        work = dist.all_gather(parts, values, async_op=True)

        def wait() -> Tensor:
            with self._blocked():
                work.wait()
            return torch.stack(parts)

        return wait

    def _shared_memory_all_gather(self, shared_memory: SharedMemoryGroup, values: Tensor) -> Callable[[], Tensor]:
        shared_memory.send_all(values.numpy().tobytes())

        def wait() -> Tensor:
            with self._blocked():
                heard = shared_memory.recv_all(values.nbytes)
            others = {rank: torch.frombuffer(bytearray(part), dtype=values.dtype) for rank, part in heard.items()}
            return torch.stack([others.get(rank, values) for rank in range(self.world_size)])

        return wait

    def all_gather(self, value: T, io: bool = False) -> list[T]:
        """The JSON value of every rank, in rank order, on every rank.

        Args:
            io: called from the one thread that works beside training; it does not wait for that, nor that for it.
        """
        if self.world_size == 1:
            return [value]
        with nullcontext() if io else self._blocked():
            return self._gather(value, self._io_group if io else None)

    def _gather(self, value: T, group: dist.ProcessGroup | None) -> list[T]:
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = content
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=group)
        return [json.loads(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]

    def broadcast_tensors(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's CPU tensors on every rank."""
        if self.world_size == 1:
            assert tensors is not None
            return tensors
        shapes = {k: (list(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in (tensors or {}).items()}
        received = {}
        for name, (shape, dtype) in self.all_gather(shapes)[0].items():
            tensor = tensors[name].contiguous() if tensors else torch.empty(shape, dtype=getattr(torch, dtype))
            with self._blocked():
                dist.broadcast(tensor, src=0)
            received[name] = tensor
        return received

    def run_on_rank_zero(self, work: Callable[[], T], per_node: bool = False) -> T:
        """Do something on rank 0 (or on the first rank of every node) alone; its JSON value, or its error, for all.

        Raises:
            UserError: what the rank that worked raised, on every rank; or the nodes came to different values.
        """
        outcome: dict[str, Any] = {}
        if self.is_rank_zero or (per_node and self.env.local_rank == 0):
            try:
                outcome["value"] = work()
            except UserError as error:
                outcome["error"] = _serialize_error(error)
        outcomes = self.all_gather(outcome)
        for other in outcomes:
            if "error" in other:
                raise _deserialize_error(other["error"])
        values: list[T] = [other["value"] for other in outcomes if other]
        if any(value != values[0] for value in values):
            raise errors.RunError(f"the machines do not see the same text or configuration: {values}"[:300])
        return values[0]

    def raise_everywhere(self) -> RaiseEverywhere:
        """Return a context: what one rank raises within it, every rank raises. For the thread that saves.

        Raises:
            UserError: of its kind, if that is what the first rank to fail raised.
            OSError: naming that rank and its error.
        """
        return RaiseEverywhere(self)

    def get_or_set(self, key: str, make: Callable[[], str]) -> str:
        """What `make` returned on the first attempt; restarts by the same agent get that value again."""
        if self._job_store is None:
            return make()
        if not self._job_store.check([key]):
            self._job_store.set(key, make())
        return self._job_store.get(key).decode()

    def set_activity(self, what: str, waiting: bool = False) -> None:
        """Tell whoever watches that this rank gets on, what it does now, and whether it needs the others for that."""
        self.heartbeat = Heartbeat(self.heartbeat.count + 1, what, waiting)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        self.set_activity(self.heartbeat.what, waiting=True)
        yield
        self.set_activity(self.heartbeat.what)

    # Failures: the rank that fails first leaves its error in the store, and those that lose it quote that.

    def report_failure(self, message: str) -> None:
        if self.store is not None:
            store, told = self.store, f"rank {self.rank}: {message}"
            with contextlib.suppress(Exception):
                call_with_timeout(ANSWER_S, lambda: store.compare_set(FAILURE, "", told))

    def reported_failure(self, wait_s: float) -> str | None:
        """What the failing rank reported, if it does within `wait_s` seconds."""
        if self.store is None:
            return None
        store, deadline = self.store, time.monotonic() + wait_s

        def ask() -> str | None:
            while not store.check([FAILURE]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            return store.get(FAILURE).decode()

        try:
            return call_with_timeout(wait_s + ANSWER_S, ask)
        except Exception:  # the store died with its host, or is cut off: nobody is left to ask
            return None
