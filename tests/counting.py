"""Count the messages and bytes that each rank sends in the package's protocols, for any rank count.

All ranks are threads of this process that take turns (`turns.py`). They share a key-value store and
collectives that replace torch's behind the same interfaces, so that the package's own code runs.

`counting_store.py` describes how requests to the store are counted. Collectives are counted as gloo
sends them: all_gather goes round a ring, broadcast down a binomial tree, gather directly to its
root, and all_reduce goes twice round a ring in chunks.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from counting_store import Count, CountingStore
from torch import Tensor
from turns import Turns

TICKS = 4  # rounds of the watchdog in a second
COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}
# Modules that use the store, and whose clock and threads are replaced. Missing ones are left out.
PATCHED = (
    "mingpt_ddp.distributed.group.rendezvous",
    "mingpt_ddp.distributed.watchdog",
    "mingpt_ddp.process.failures",
    "mingpt_ddp.process.job_store",
    "mingpt_ddp.distributed.group.process_group",
)


class Group:
    """A process group that contains all ranks."""

    def __init__(self, network: Network, kind: str) -> None:
        self._network = network
        self._kind = kind
        self._numbers: Counter[int] = Counter()  # collectives begun, by rank
        self._meetings: dict[int, dict[int, Any]] = defaultdict(dict)

    def exchange(self, value: Any) -> Callable[[], dict[int, Any]]:
        """Begin a collective. Return a function that waits for the values of all ranks."""
        turns = self._network.turns
        rank = turns.rank
        number = self._numbers[rank]
        self._numbers[rank] += 1
        meeting = self._meetings[number]
        meeting[rank] = value
        topic = (self._kind, number)
        if len(meeting) == self._network.world_size:
            del self._meetings[number]  # the ranks that still wait have their own reference
            turns.notify(topic)

        def wait() -> dict[int, Any]:
            while len(meeting) < self._network.world_size:
                turns.wait(topic)
            return meeting

        return wait


class Network:
    """The store and the collectives of `world_size` ranks, with a count of each rank's traffic."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.turns = Turns()
        self.of_store: list[Count] = []
        self.of_collectives: list[Count] = []
        self._values: dict[str, bytes] = {}
        self.stores: list[CountingStore] = []
        for _ in range(world_size):
            self.of_store.append(Count())
            self.of_collectives.append(Count())
        for count in self.of_store:
            self.stores.append(CountingStore(self._values, self.turns, count))
        self._world = Group(self, "world")
        self._groups: dict[int, Group] = {}  # by the number of earlier new_group calls
        self._new_groups: Counter[int] = Counter()  # calls of new_group, by rank
        self.held: dict[int, HeldThread] = {}  # watchdog threads, by rank

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work` with each rank in a thread of its own. Return the results by rank."""
        return self.turns.run([partial(work, rank) for rank in range(self.world_size)])

    def take_counts(self) -> list[Count]:
        """Return the traffic of each rank since the last call."""
        taken = []
        for store, collectives in zip(self.of_store, self.of_collectives, strict=True):
            messages = store.messages + collectives.messages
            sent = store.sent + collectives.sent
            taken.append(Count(messages, sent, store.received + collectives.received))
            for count in (store, collectives):
                count.__init__()  # type: ignore[misc]  # the stores hold it
        return taken

    # Replacements for functions of torch.distributed, with the same arguments.

    def _begin(
        self, group: Any, value: Any, finish: Callable[[dict[int, Any]], None], is_async: bool
    ) -> Any:
        receive = (group or self._world).exchange(value)

        def wait() -> None:
            finish(receive())

        if is_async:
            return SimpleNamespace(wait=wait)
        wait()
        return None

    @property
    def _count(self) -> Count:
        return self.of_collectives[self.turns.rank]

    def all_gather(
        self, parts: list[Tensor], values: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        self._count.send(values.nbytes, self.world_size - 1)
        self._count.receive(values.nbytes, self.world_size - 1)

        def finish(by_rank: dict[int, Tensor]) -> None:
            for rank, part in enumerate(parts):
                part.copy_(by_rank[rank])

        return self._begin(group, values.clone(), finish, async_op)

    def gather(
        self,
        values: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        root = dst or group_dst or 0
        if self.turns.rank == root:
            self._count.receive(values.nbytes, self.world_size - 1)
        else:
            self._count.send(values.nbytes)

        def finish(by_rank: dict[int, Tensor]) -> None:
            for rank, part in enumerate(gather_list or []):
                part.copy_(by_rank[rank])

        return self._begin(group, values.clone(), finish, async_op)

    def broadcast(
        self,
        values: Tensor,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        root = src or group_src or 0
        place = (self.turns.rank - root) % self.world_size
        if place:
            self._count.receive(values.nbytes)
        self._count.send(values.nbytes, children(place, self.world_size))

        def finish(by_rank: dict[int, Tensor]) -> None:
            values.copy_(by_rank[root])

        own = values.clone() if place == 0 else None
        return self._begin(group, own, finish, async_op)

    def all_reduce(
        self,
        values: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        chunks = min(values.numel(), 2 * (self.world_size - 1))
        size = -(-values.nbytes // max(1, chunks))
        self._count.send(size, 2 * chunks)
        self._count.receive(size, 2 * chunks)

        def finish(by_rank: dict[int, Tensor]) -> None:
            stacked = torch.stack([by_rank[rank] for rank in range(self.world_size)])
            values.copy_(COMBINE[op](stacked, dim=0))

        return self._begin(group, values.clone(), finish, async_op)

    def new_group(self, *_: Any, **__: Any) -> Group:
        rank = self.turns.rank
        number = self._new_groups[rank]
        self._new_groups[rank] += 1
        return self._groups.setdefault(number, Group(self, f"group {number}"))

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the functions of torch.distributed, and the clock and store of the package."""
        from mingpt_ddp.distributed import watchdog
        from mingpt_ddp.distributed.group import shared_memory

        functions: dict[str, Any] = {
            "all_gather": self.all_gather,
            "gather": self.gather,
            "broadcast": self.broadcast,
            "all_reduce": self.all_reduce,
            "new_group": self.new_group,
            "get_world_size": lambda group=None: self.world_size,
            "get_rank": lambda group=None: self.turns.rank,
            "init_process_group": lambda *_, **__: None,
            "is_initialized": lambda: True,
        }
        names = vars(time) | {"monotonic": lambda: self.turns.now, "sleep": self.turns.sleep}
        with contextlib.ExitStack() as patches:
            for name, function in functions.items():
                patches.enter_context(mock.patch.object(dist, name, function))
            replaced: dict[str, Any] = {
                "time": SimpleNamespace(**names),
                "threading": self._threads(InlineThread),
                "clone_store": lambda store: store,
                "open_store": self._open_store,
            }
            found = set()
            for module in modules(PATCHED):
                for name, value in replaced.items():
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, value))
                        found.add(name)
            assert found == {*replaced}, "the package calls it otherwise now"
            threads = self._threads(partial(HeldThread, self))
            patches.enter_context(mock.patch.object(watchdog, "threading", threads))
            patches.enter_context(mock.patch.object(shared_memory, "_machine_id", self._machine))
            yield

    def _threads(self, thread: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **vars(threading) | {"Thread": thread, "Event": partial(Ticks, self.turns)}
        )

    def _open_store(self, env: Any, job: int, timeout_s: float) -> dist.Store:
        return dist.PrefixStore(f"mingpt_ddp/{job}", self.stores[env.rank])

    def _machine(self) -> list[str]:
        """Give each rank its own machine, since traffic through shared memory is not counted."""
        return [f"node{self.turns.rank:05}", "5f" * 18, "net:[4026531840]"]


class InlineThread:
    """A thread that runs inside the thread that starts it, and so belongs to the same rank."""

    def __init__(self, *, target: Callable[..., Any], args: Sequence[Any] = (), **_: Any) -> None:
        self._work = partial(target, *args)

    def start(self) -> None:
        self._work()

    def join(self, timeout: float | None = None) -> None:
        """Do nothing: `start` returns only once the thread has ended."""


class HeldThread(InlineThread):
    """The thread of a watchdog. It runs when the rank calls `play`."""

    def __init__(self, network: Network, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._network = network

    def start(self) -> None:
        self._network.held[self._network.turns.rank] = self

    def play(self) -> None:
        super().start()


class Ticks:
    """A threading.Event that waits by the clock of the ranks, and is set after TICKS waits."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._left = TICKS

    def is_set(self) -> bool:
        return self._left < 0

    def set(self) -> None:
        self._left = -1

    def wait(self, timeout: float) -> bool:
        self._turns.sleep(timeout)
        self._left -= 1
        return self.is_set()


def children(place: int, world_size: int) -> int:
    """Return the number of ranks to which a rank sends in a binomial tree.

    In round i, each rank at a place below 2**i sends to the rank that is 2**i places further.

    Args:
        place: Distance of the rank from the root.
        world_size: Number of ranks in the tree.
    """
    rounds = range(place.bit_length(), world_size.bit_length())
    return sum(place + (1 << number) < world_size for number in rounds)


def modules(names: Sequence[str]) -> list[ModuleType]:
    """Import the modules with these names, and skip the ones that do not exist."""
    found = []
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(name))
    return found
