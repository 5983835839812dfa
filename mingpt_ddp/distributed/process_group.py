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
from mingpt_ddp.distributed.env import Place
from mingpt_ddp.distributed.rendezvous import connect, meet, stop_if_fatal, within
from mingpt_ddp.distributed.shared_memory import Neighbours
from mingpt_ddp.errors import UserError

T = TypeVar("T")
FAILURE = "failure"  # the store's key of what the first rank to fail met
ANSWER_S = 5.0  # that the store may take on a busy machine
ALL_FAILED_S = 5.0  # within which ranks that meet the same error do so


@dataclass(frozen=True)
class Mark:
    """Where the thread that trains is; `watch` finds out who keeps the others waiting."""

    count: int  # grows whenever it gets on
    what: str
    waiting: bool  # for other ranks


def _packed(error: Exception) -> tuple[str, str]:
    """The kind of an error and its message, on the way to other ranks; what is no UserError travels as an OSError."""
    if isinstance(error, UserError):
        return type(error).__name__, str(error.args[0])
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return "OSError", " ".join(told.split())


def _unpacked(packed: tuple[str, str], where: str = "") -> Exception:
    """The error that another rank has packed; an OSError says `where` it was."""
    kind, message = packed
    if kind == "OSError":
        return OSError(f"{where}{message}")
    error: UserError = getattr(errors, kind)(message)
    return error


class Ranks:
    """All ranks of the job, as seen from one of them."""

    def __init__(self, place: Place, backend: str, timeout_s: float, job: int) -> None:
        """Join the process group of this attempt.

        Args:
            backend: as torch.distributed names it.
            timeout_s: how long a rank waits for the others, in seconds.
            job: the number of the job in a sweep; every job has a process group of its own.
        """
        self.place, self.timeout_s = place, timeout_s
        self.rank, self.world_size, self.is_main = place.rank, place.world_size, place.is_main
        self.store: dist.Store | None = None  # of this attempt
        self._job_store: dist.Store | None = None  # of all attempts under one agent
        self._side: dist.ProcessGroup | None = None  # for one thread beside the one that trains
        self.neighbours: Neighbours | None = None  # where all ranks are on one machine and nothing else is wanted
        self.mark = Mark(0, "starting", waiting=False)
        if self.world_size > 1 or place.agent:  # a worker whose agent is gone already finds no store
            self._job_store = connect(place, job, timeout_s)
            stop_if_fatal(self._job_store)
        if self.world_size > 1:
            self._join(self._job_store, backend)

    def _join(self, job_store: dist.Store | None, backend: str) -> None:
        assert job_store is not None
        self.store = meet(job_store, self.place, self.timeout_s)
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        # Whoever uses it may wait for a storage that is away; that a rank has died it notices all the same.
        self._side = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    def close(self) -> None:
        """Leave the process group together: a rank that goes early would stall a launcher's exit."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
        if self.neighbours is not None:
            self.neighbours.close()

    def all_failed(self, message: str) -> bool:
        """Whether every rank has met the same error; then this attempt is over, and all may begin another together."""
        if self.world_size > 1:
            assert self.store is not None
            store = self.store
            keys = [f"failed/{rank}" for rank in range(self.world_size)]
            try:
                within(ANSWER_S, lambda: store.set(keys[self.rank], message))
                within(ALL_FAILED_S + ANSWER_S, lambda: store.wait(keys, timedelta(seconds=ALL_FAILED_S)))
                if any(store.get(key).decode() != message for key in keys):
                    return False
            except Exception:  # another rank has not failed, or cannot say so
                return False
            dist.destroy_process_group()
        return True

    # Small control data travels as JSON in CPU tensors: torch's object collectives would unpickle it.

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all ranks of a CPU tensor, in place."""
        if self.world_size > 1:
            with self._waiting():
                dist.all_reduce(values)
        return values

    def gather_later(self, values: Tensor) -> Callable[[], Tensor]:
        """A CPU tensor (n) of every rank as (world size, n), under way until the function returned is called."""
        if self.world_size == 1:
            return lambda: values[None]
        if self.neighbours is not None:
            return self._hear_later(self.neighbours, values)
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        work = dist.all_gather(parts, values, async_op=True)

        def wait() -> Tensor:
            with self._waiting():
                work.wait()
            return torch.stack(parts)

        return wait

    def _hear_later(self, neighbours: Neighbours, values: Tensor) -> Callable[[], Tensor]:
        neighbours.tell(values.numpy().tobytes())

        def wait() -> Tensor:
            with self._waiting():
                heard = neighbours.hear(values.nbytes)
            others = {rank: torch.frombuffer(bytearray(part), dtype=values.dtype) for rank, part in heard.items()}
            return torch.stack([others.get(rank, values) for rank in range(self.world_size)])

        return wait

    def gather(self, value: T, beside: bool = False) -> list[T]:
        """The JSON value of every rank, in rank order, on every rank.

        Args:
            beside: called from the one thread that works beside training; it does not wait for that, nor that for it.
        """
        if self.world_size == 1:
            return [value]
        with nullcontext() if beside else self._waiting():
            return self._gather(value, self._side if beside else None)

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

    def broadcast(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's CPU tensors on every rank."""
        if self.world_size == 1:
            assert tensors is not None
            return tensors
        shapes = {k: (list(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in (tensors or {}).items()}
        received = {}
        for name, (shape, dtype) in self.gather(shapes)[0].items():
            tensor = tensors[name].contiguous() if tensors else torch.empty(shape, dtype=getattr(torch, dtype))
            with self._waiting():
                dist.broadcast(tensor, src=0)
            received[name] = tensor
        return received

    def first(self, work: Callable[[], T], per_node: bool = False) -> T:
        """Do something on rank 0 (or on the first rank of every node) alone; its JSON value, or its error, for all.

        Raises:
            UserError: what the rank that worked raised, on every rank; or the nodes came to different values.
        """
        outcome: dict[str, Any] = {}
        if self.is_main or (per_node and self.place.local_rank == 0):
            try:
                outcome["value"] = work()
            except UserError as error:
                outcome["error"] = _packed(error)
        outcomes = self.gather(outcome)
        for other in outcomes:
            if "error" in other:
                raise _unpacked(other["error"])
        values: list[T] = [other["value"] for other in outcomes if other]
        if any(value != values[0] for value in values):
            raise errors.RunError(f"the machines do not see the same text or configuration: {values}"[:300])
        return values[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do something on all ranks from the thread beside training; every rank's JSON value, in rank order.

        Raises:
            UserError: of its kind, if that is what the first rank to fail met.
            OSError: naming that rank and what it met.
        """
        outcome: dict[str, Any] = {}
        try:
            outcome["value"] = work()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            outcome["error"] = _packed(error)
        outcomes = self.gather(outcome, beside=True)
        for rank, other in enumerate(outcomes):
            if "error" in other:
                raise _unpacked(other["error"], "" if self.world_size == 1 else f"rank {rank}: ")
        return [other["value"] for other in outcomes]

    def remember(self, key: str, make: Callable[[], str]) -> str:
        """What `make` returned on the first attempt; restarts by the same agent get that value again."""
        if self._job_store is None:
            return make()
        if not self._job_store.check([key]):
            self._job_store.set(key, make())
        return self._job_store.get(key).decode()

    def at(self, what: str, waiting: bool = False) -> None:
        """Tell whoever watches that this rank gets on, what it does now, and whether it needs the others for that."""
        self.mark = Mark(self.mark.count + 1, what, waiting)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.at(self.mark.what, waiting=True)
        yield
        self.at(self.mark.what)

    # Failures: the rank that fails first leaves its error in the store, and those that lose it quote that.

    def report_failure(self, message: str) -> None:
        if self.store is not None:
            store, told = self.store, f"rank {self.rank}: {message}"
            with contextlib.suppress(Exception):
                within(ANSWER_S, lambda: store.compare_set(FAILURE, "", told))

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
            return within(wait_s + ANSWER_S, ask)
        except Exception:  # the store died with its host, or is cut off: nobody is left to ask
            return None
