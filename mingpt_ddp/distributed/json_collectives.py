"""all_gather of JSON values: torch's object collectives unpickle what they receive."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SHORT_BYTES = 1016  # of a value: most fit into the first message


def all_gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the JSON value of every rank of a group, in rank order. A collective."""
    content = json.dumps(value).encode()
    start = len(content).to_bytes(8, "little") + content[:SHORT_BYTES]
    starts = [part.numpy().tobytes() for part in _all_gather(start, 8 + SHORT_BYTES, group)]
    sizes = [int.from_bytes(each[:8], "little") for each in starts]
    rests = [torch.empty(0, dtype=torch.uint8)] * len(starts)
    if max(sizes) > SHORT_BYTES:
        rests = _all_gather(content[SHORT_BYTES:], max(sizes) - SHORT_BYTES, group)
    values = []
    for first, rest, size in zip(starts, rests, sizes, strict=True):
        end = max(0, size - SHORT_BYTES)  # copies of the whole padding could fill the memory
        values.append(json.loads(first[8 : 8 + size] + rest[:end].numpy().tobytes()))
    return values


def _all_gather(content: bytes, size: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the content of every rank (size) as bytes, padded with zeros."""
    padded = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return parts
