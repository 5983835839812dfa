"""Compare the copies that ranks hold of a tensor, to find memory that has changed silently.

Ranks that train together hold equal copies of weights and of most of the state, bit for bit. A
flipped bit in one of them raises no error, and every later step carries it on.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20  # elements; a sum in int64 converts that many at once


@dataclass(frozen=True)
class Difference:
    """Tensors of which not all copies are equal."""

    tensors: list[str]
    ranks: list[int]  # whose copy differs from that of most ranks; if there is none, all holders
    has_majority: bool  # for each of the tensors

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        more = f" (and {len(self.tensors) - 1} more)" if len(self.tensors) > 1 else ""
        if not self.has_majority:
            return f"one of the ranks {ranks} holds a damaged copy of {self.tensors[0]}{more}"
        if len(self.ranks) > 1:
            return f"ranks {ranks} hold other copies than the rest of {self.tensors[0]}{more}"
        return f"rank {ranks} holds another copy than the others of {self.tensors[0]}{more}"


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers of its width, modulo 2**64.

    Any single flipped bit changes it. It does not depend on the order of the additions.
    """
    flat = tensor.detach().contiguous().flatten()
    flat = flat.view(INTEGERS[tensor.element_size()])
    return torch.stack([part.sum(dtype=torch.int64) for part in flat.split(CHUNK)]).sum()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor; a GPU is waited for once."""
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_device[tensor.device].append(name)
    sums: dict[str, int] = {}
    for names in by_device.values():
        on_device = torch.stack([checksum(tensors[name]) for name in names])
        sums.update(zip(names, on_device.tolist(), strict=True))
    return sums


def copy_name(kind: str, name: str, tensor: Tensor, part: int) -> str:
    """Name a tensor so that copies of it have the same name, and no others.

    Args:
        kind: of what it is: model, optimizer, ema.
        part: which part of a divided model the rank holds.
    """
    shape = tuple(tensor.shape)
    return f"{kind} {name} {shape}" + (f" of part {part}" if part else "")


def find_difference(by_rank: Sequence[Mapping[str, int]]) -> Difference | None:
    """Return which tensors have unequal copies, and which ranks hold the odd ones.

    Where no value is that of most copies, any of them may be right: then all holders are named.

    Args:
        by_rank: checksums by name; a rank need not hold every tensor.
    """
    holders: dict[str, list[tuple[int, int]]] = defaultdict(list)  # rank and checksum
    for rank, sums in enumerate(by_rank):
        for name, value in sums.items():
            holders[name].append((rank, value))
    tensors = []
    odd: set[int] = set()
    have_majority = True
    for name, held in holders.items():
        value, count = Counter(value for _, value in held).most_common(1)[0]
        if count == len(held):
            continue
        tensors.append(name)
        is_majority = 2 * count > len(held)
        have_majority &= is_majority
        odd.update(rank for rank, other in held if other != value or not is_majority)
    return Difference(tensors, sorted(odd), have_majority) if tensors else None
