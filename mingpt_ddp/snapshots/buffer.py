"""A safetensors file in host memory: tensors are copied to where they stand in the file, which is written as it is.

The format is that of https://github.com/huggingface/safetensors: the header's length (8 bytes, little-endian), the
header (JSON), the data. Making the file in place saves the second copy that an encoder would need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

LARGEST_HEADER = 1 << 24  # bytes; that of a model with 100,000 tensors is smaller
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsBuffer:
    """The file that holds certain tensors, to be filled with their values again and again."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Room for tensors of these names, shapes and types; pinned where they are on a GPU."""
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps all aligned
        header: dict[str, Any] = {}
        end = 0
        for name, tensor in ordered:
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        data = 8 + len(encoded)
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        self._bytes = torch.empty(data + end, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes[:data] = torch.frombuffer(
            bytearray(len(encoded).to_bytes(8, "little") + encoded), dtype=torch.uint8
        )
        self._places = {}
        for name, tensor in ordered:
            begin, stop = header[name]["data_offsets"]
            place = self._bytes[data + begin : data + stop]
            self._places[name] = place.view(tensor.dtype).view(tensor.shape)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it has room for exactly these."""
        if tensors.keys() != self._places.keys():
            return False
        return all((p.shape, p.dtype) == (tensors[n].shape, tensors[n].dtype) for n, p in self._places.items())

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values; those of a GPU are there when its current stream has got so far."""
        for name, place in self._places.items():
            place.copy_(tensors[name].detach(), non_blocking=True)

    @property
    def content(self) -> memoryview:
        """The bytes of the file, not a copy."""
        return memoryview(self._bytes.numpy())  # type: ignore[arg-type]


def encode(tensors: Mapping[str, Tensor]) -> memoryview:
    """The bytes of a safetensors file."""
    image = SafetensorsBuffer(tensors)
    image.fill(tensors)
    return image.content


def decode(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, none of them larger than the file.

    Raises:
        ValueError: it is none.
    """
    if int.from_bytes(content[:8], "little") > LARGEST_HEADER:
        raise ValueError("its header is too large")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except Exception as error:  # the library has an exception of its own
        raise ValueError(str(error)) from error
    return tensors
