"""Collectives that exchange JSON values.

Torch's object collectives are not used, because they unpickle data from other ranks.
"""

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

# The first message of a broadcast holds the size of the value, and the first part of the value.
SIZE_FIELD_BYTES = 8
FIRST_PART_BYTES = 1016


@dataclass(frozen=True)
class CallResult:
    """The result of a call on this rank: its value or its error."""

    # JSON value to send to other ranks: {"value": ...}, or {"error": ..., "rank": this rank}.
    packed: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None  # the error itself, with its traceback


class JsonCollectives:
    """Exchange JSON values between ranks, and share the result or the error of a call.

    Only small values are sent from every rank to every rank. A value that grows with the number of
    tensors, the names or the configuration is broadcast, or gathered on rank zero.
    """

    def __init__(
        self,
        env: DistEnv,
        group: dist.ProcessGroup | None = None,
        shared_errors: type[Exception] = UserError,
    ) -> None:
        """
        Args:
            group: A process group of all ranks, for CPU tensors. None for the default group.
            shared_errors: If a call raises such an error, then it is raised on every rank. Any
                other error is raised only on the rank where it occurs, before the collective.
        """
        self.env = env
        self.rank = env.rank
        self.world_size = env.world_size
        self.is_rank_zero = env.is_rank_zero
        self._group = group
        self._shared_errors = shared_errors

    def all_gather(self, value: T, on_rank_zero: bool = False) -> list[T]:
        """Gather the JSON values of all ranks, in rank order.

        Args:
            value: The value of this rank. It must be small unless `on_rank_zero` is set.
            on_rank_zero: Gather only on rank zero. The other ranks return an empty list.
        """
        if self.world_size == 1:
            return [value]
        gathers_here = self.is_rank_zero or not on_rank_zero
        with self._blocked():
            encoded = self._encode_padded(value)
            parts = [torch.empty_like(encoded) for _ in range(self.world_size * gathers_here)]
            if on_rank_zero:
                dist.gather(encoded, parts or None, dst=0, group=self._group)
            else:
                dist.all_gather(parts, encoded, group=self._group)
        return [_decode(part) for part in parts]

    def broadcast_json(self, value: T) -> T:
        """Return rank zero's JSON value on every rank.

        The values of the other ranks are ignored. Most values fit into the first message, which
        contains their size, so a second message is rare.
        """
        if self.world_size == 1:
            return value
        content = json.dumps(value).encode() if self.is_rank_zero else b""
        size = len(content).to_bytes(SIZE_FIELD_BYTES, "little")
        first = _tensor(size + content[:FIRST_PART_BYTES], SIZE_FIELD_BYTES + FIRST_PART_BYTES)
        with self._blocked():
            dist.broadcast(first, src=0, group=self._group)
            parts = [first[SIZE_FIELD_BYTES:]]
            left = (
                int.from_bytes(first[:SIZE_FIELD_BYTES].numpy().tobytes(), "little")
                - FIRST_PART_BYTES
            )
            if left > 0:
                rest = _tensor(content[FIRST_PART_BYTES:], left)
                dist.broadcast(rest, src=0, group=self._group)
                parts.append(rest)
        return _decode(torch.cat(parts))

    def all_agree(self, value: Any) -> bool:
        """Return True if all ranks pass the same JSON value. Only a digest is sent."""
        if self.world_size == 1:
            return True
        content = json.dumps(value, sort_keys=True).encode()
        number = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
        extremes = torch.tensor([number, -number])
        with self._blocked():
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        return extremes.tolist() == [number, -number]

    def check_agreement(self, value: T, refuse: Callable[[list[T]], None]) -> None:
        """Check that all ranks have the same value. A collective.

        Args:
            value: The value of this rank.
            refuse: If the values differ, rank zero calls it with the values of all ranks, in rank
                order. It raises an error that describes the difference.
        """
        if not self.all_agree(value):
            self.decide_on_rank_zero(lambda: value, refuse)

    def run_on_rank_zero(self, work: Callable[[], T]) -> T:
        """Call `work` on rank zero, and return its JSON value on every rank.

        Raises:
            UserError: The call has raised this error. It is raised on every rank.
            OSError: The call has raised another error whose class is in `shared_errors`. The
                message names the rank, and the errno is the same as in the original error.
        """
        result = self._attempt(work) if self.is_rank_zero else CallResult()
        return self._value_or_raise(self.broadcast_json(result.packed), result)

    def keep_on_rank_zero(self, work: Callable[[], T]) -> T | None:
        """Call `work` on rank zero, and return its value there. Return None on other ranks.

        The value may have any type, because it is not sent to other ranks.

        Raises:
            UserError, OSError: The call has failed; see `run_on_rank_zero`.
        """
        results = list[T]()
        self.run_on_rank_zero(lambda: results.append(work()))
        return results[0] if results else None

    def run_on_each_node(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank of every node, and return its JSON value on every rank.

        Raises:
            UserError, OSError: A call has failed; see `run_on_rank_zero`.
            RunError: The nodes returned different values.
        """
        is_caller = self.env.local_rank == 0 or self.is_rank_zero
        return self.decide_on_rank_zero(lambda: [work()] if is_caller else [], _common_value)

    def decide_on_rank_zero(self, work: Callable[[], T], decide: Callable[[list[T]], D]) -> D:
        """Call `work` on every rank, and let rank zero decide on the results. A collective.

        Args:
            work: Returns a JSON value.
            decide: Rank zero calls it with the values of all ranks, in rank order. Its result is
                a small JSON value, which is returned on every rank.

        Raises:
            UserError, OSError: A call of `work` has failed, or else the call of `decide`; see
                `run_on_rank_zero`. If several ranks have failed, the error of the first one counts.
        """
        result = self._attempt(work)
        packed = result.packed
        gathered = self.all_gather(packed, on_rank_zero=True)
        if self.is_rank_zero:
            failed = [each for each in gathered if "error" in each]
            if failed:
                packed = failed[0]
            else:
                result = self._attempt(partial(decide, [each["value"] for each in gathered]))
                packed = result.packed
        return self._value_or_raise(self.broadcast_json(packed), result)

    def _attempt(self, work: Callable[[], Any]) -> CallResult:
        try:
            return CallResult({"value": work()})
        except self._shared_errors as error:
            traceback = error.__traceback__
            # Remove this function from the traceback.
            error = error.with_traceback(traceback and traceback.tb_next)
            return CallResult({"error": pack_error(error), "rank": self.rank}, error)

    def _value_or_raise(self, packed: dict[str, Any], own: CallResult) -> Any:
        """Return the value of a packed result, or raise its error.

        Args:
            packed: The result that all ranks share.
            own: The result of this rank. Its error becomes the cause of the raised error.
        """
        if "error" not in packed:
            return packed["value"]
        rank = packed["rank"] if self.world_size > 1 else None
        raise unpack_error(packed["error"], rank) from own.error

    def _blocked(self) -> AbstractContextManager[None]:
        """Return a context for waiting in a collective.

        The process group of several ranks overrides this, to tell the watchdog that it waits.
        """
        return nullcontext()

    def _encode_padded(self, value: Any) -> Tensor:
        """Encode a JSON value, padded to the length of the longest value of all ranks.

        A collective.
        """
        content = json.dumps(value).encode()
        size = torch.tensor([len(content)])
        dist.all_reduce(size, dist.ReduceOp.MAX, self._group)
        return _tensor(content, int(size))


def _common_value(values_by_rank: list[list[T]]) -> T:
    values = [*itertools.chain.from_iterable(values_by_rank)]
    if any(value != values[0] for value in values):
        difference = f"the nodes have different texts or configurations: {values}"[:300]
        raise RunError(f"{difference}; give every node the same files")
    return values[0]


def _tensor(content: bytes, size: int) -> Tensor:
    """Return a tensor (size) of these bytes, padded with spaces."""
    return torch.frombuffer(bytearray(content.ljust(size)), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    """Return the JSON value in these bytes. The parser skips the padding."""
    return json.loads(content.numpy().tobytes())


def refuse_differing_names(by_rank: list[list[str]]) -> None:
    """Refuse losses or metrics that only some ranks have, because they have no mean over ranks.

    Args:
        by_rank: Names of the losses or metrics of each rank.

    Raises:
        TrainingError: Two ranks have different names. The message lists the names that differ.
    """
    for rank, names in enumerate(by_rank):
        if differing := sorted({*names} ^ {*by_rank[0]}):
            raise TrainingError(
                f"ranks 0 and {rank} have different losses or metrics: {', '.join(differing)}; "
                "return the same names on every rank"
            )
