"""Collectives of JSON values: torch's object collectives unpickle what they receive."""

import hashlib
import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt_ddp.errors import RunError, TrainingError, UserError, pack_error, unpack_error
from mingpt_ddp.process.env import DistEnv

T = TypeVar("T")
D = TypeVar("D")

SIZE_BYTES = 8  # before a value that is broadcast
SHORT_BYTES = 1016  # of the value, in the first message


@dataclass(frozen=True)
class Answer:
    """What a call ended with on this rank."""

    # Its JSON value by "value", or its error by "error" with its rank.
    packed: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class JsonCollectives:
    """Collectives of JSON values on all ranks, and of what calls return or raise there.

    A value that grows with tensors, names or the configuration is broadcast, or gathered on rank
    zero; only small ones go from every rank to every rank.
    """

    def __init__(
        self,
        env: DistEnv,
        group: dist.ProcessGroup | None = None,
        caught: type[Exception] = UserError,
    ) -> None:
        """
        Args:
            group: of all ranks, for CPU tensors; None: the default one.
            caught: which errors of a call are raised on every rank. Others are raised on their rank
                alone, before the collective.
        """
        self.env = env
        self.rank = env.rank
        self.world_size = env.world_size
        self.is_rank_zero = env.is_rank_zero
        self._group = group
        self._caught = caught

    def all_gather(self, value: T, on_rank_zero: bool = False) -> list[T]:
        """Return the small JSON value of every rank, in rank order.

        Args:
            on_rank_zero: alone, where it may be large; the others return [].
        """
        if self.world_size == 1:
            return [value]
        gets_parts = self.is_rank_zero or not on_rank_zero
        with self._blocked():
            encoded = self._padded(value)
            parts = [torch.empty_like(encoded) for _ in range(self.world_size * gets_parts)]
            if on_rank_zero:
                dist.gather(encoded, parts or None, dst=0, group=self._group)
            else:
                dist.all_gather(parts, encoded, group=self._group)
        return [_decode(part) for part in parts]

    def broadcast_json(self, value: T) -> T:
        """Return rank zero's JSON value on every rank; what the others pass is ignored.

        Most values fit into the first message, which says how long the value is.
        """
        if self.world_size == 1:
            return value
        content = json.dumps(value).encode() if self.is_rank_zero else b""
        size = len(content).to_bytes(SIZE_BYTES, "little")
        first = _tensor(size + content[:SHORT_BYTES], SIZE_BYTES + SHORT_BYTES)
        with self._blocked():
            dist.broadcast(first, src=0, group=self._group)
            parts = [first[SIZE_BYTES:]]
            left = int.from_bytes(first[:SIZE_BYTES].numpy().tobytes(), "little") - SHORT_BYTES
            if left > 0:
                rest = _tensor(content[SHORT_BYTES:], left)
                dist.broadcast(rest, src=0, group=self._group)
                parts.append(rest)
        return _decode(torch.cat(parts))

    def all_agree(self, value: Any) -> bool:
        """Return whether every rank passes the same JSON value; only a digest is sent."""
        if self.world_size == 1:
            return True
        content = json.dumps(value, sort_keys=True).encode()
        number = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
        extremes = torch.tensor([number, -number])
        with self._blocked():
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        return extremes.tolist() == [number, -number]

    def check_agreement(self, value: T, refuse: Callable[[list[T]], None]) -> None:
        """Call `refuse` on rank zero with the values of all ranks, unless they agree."""
        if not self.all_agree(value):
            self.decide_on_rank_zero(lambda: value, refuse)

    def run_on_rank_zero(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0; return its JSON value on every rank.

        Raises:
            UserError: on every rank, the error of rank 0.
            OSError: in place of any other error that is caught; names the rank, has its errno.
        """
        outcome = self._attempt(work) if self.is_rank_zero else Answer()
        return self._value_of(self.broadcast_json(outcome.packed), outcome)

    def keep_on_rank_zero(self, work: Callable[[], T]) -> T | None:
        """Call `work` on rank 0; return its value there, of any type, and None on other ranks.

        Raises:
            UserError, OSError: as `run_on_rank_zero`.
        """
        results = list[T]()
        self.run_on_rank_zero(lambda: results.append(work()))
        return results[0] if results else None

    def run_on_each_node(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank of every node; return its JSON value on every rank.

        Raises:
            UserError, OSError: as `run_on_rank_zero`; or the nodes returned different values.
        """
        is_caller = self.env.local_rank == 0 or self.is_rank_zero
        return self.decide_on_rank_zero(lambda: [work()] if is_caller else [], _common_value)

    def decide_on_rank_zero(self, work: Callable[[], T], decide: Callable[[list[T]], D]) -> D:
        """Call `work` on every rank, and `decide` on rank zero with its JSON values. A collective.

        Args:
            decide: takes the values in rank order; its own is small, and returned on every rank.

        Raises:
            UserError, OSError: as `run_on_rank_zero`, of the first rank whose `work` failed, or of
                `decide`.
        """
        outcome = self._attempt(work)
        packed = outcome.packed
        gathered = self.all_gather(packed, on_rank_zero=True)
        if self.is_rank_zero:
            failed = [each for each in gathered if "error" in each]
            if failed:
                packed = failed[0]
            else:
                outcome = self._attempt(partial(decide, [each["value"] for each in gathered]))
                packed = outcome.packed
        return self._value_of(self.broadcast_json(packed), outcome)

    def _attempt(self, work: Callable[[], Any]) -> Answer:
        try:
            return Answer({"value": work()})
        except self._caught as error:
            traceback = error.__traceback__
            error = error.with_traceback(traceback and traceback.tb_next)  # without this frame
            return Answer({"error": pack_error(error), "rank": self.rank}, error)

    def _value_of(self, packed: dict[str, Any], own: Answer) -> Any:
        """Return the value of an outcome, or raise its error.

        Args:
            own: the outcome on this rank, whose error is the cause.
        """
        if "error" not in packed:
            return packed["value"]
        rank = packed["rank"] if self.world_size > 1 else None
        raise unpack_error(packed["error"], rank) from own.error

    def _blocked(self) -> AbstractContextManager[None]:
        """Return a context in which this rank waits for others."""
        return nullcontext()

    def _padded(self, value: Any) -> Tensor:
        """Return a JSON value, as long as the longest of all ranks. A collective."""
        content = json.dumps(value).encode()
        size = torch.tensor([len(content)])
        dist.all_reduce(size, dist.ReduceOp.MAX, self._group)
        return _tensor(content, int(size))


def _common_value(of_ranks: list[list[T]]) -> T:
    values = [*itertools.chain.from_iterable(of_ranks)]
    if any(value != values[0] for value in values):
        raise RunError(f"the nodes have different texts or configurations: {values}"[:300])
    return values[0]


def _tensor(content: bytes, size: int) -> Tensor:
    """Return bytes (size), padded with spaces."""
    return torch.frombuffer(bytearray(content.ljust(size)), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    """Return the JSON value of padded bytes: the parser skips spaces."""
    return json.loads(content.numpy().tobytes())


def refuse_differing_names(by_rank: list[list[str]]) -> None:
    """Refuse losses or metrics that not all ranks have, of which no mean can be taken.

    Raises:
        TrainingError: names a rank and what differs.
    """
    for rank, names in enumerate(by_rank):
        if differing := sorted({*names} ^ {*by_rank[0]}):
            raise TrainingError(
                f"rank {rank} has other losses or metrics than rank 0: {', '.join(differing)}; "
                "return the same names on every rank"
            )
