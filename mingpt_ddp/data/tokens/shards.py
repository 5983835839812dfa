"""Present the tokens of several files as one array."""

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from mingpt_ddp.data.rng import Ints
from mingpt_ddp.data.tokens.token_files import TokenFile, cut

MAX_MAPPED_FILES = 128  # each memory map in Python keeps a file descriptor open


class Shards:
    """The tokens of several files in a row. A file is mapped to memory when it is read."""

    def __init__(self, files: list[TokenFile], dtype: Any) -> None:
        """
        Args:
            files: The files in the order of their tokens.
            dtype: Type that the tokens are viewed as. It has the same size as their own type.
        """
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self._files = files
        # Index of the first token of each file, then the number of all tokens.
        self._begins = [0, *accumulate(file.length for file in files)]
        self._map = lru_cache(MAX_MAPPED_FILES)(TokenFile.memmap)

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def nbytes(self) -> int:
        return len(self) * self.itemsize

    def __getitem__(self, part: slice) -> "Shards":
        """Select a slice of the tokens. Its step must be 1."""
        begin, end, _ = part.indices(len(self))
        return Shards(cut(self._files, begin, end), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        tokens = np.empty(len(self), self.dtype)
        self._read_into(tokens, 0)
        return tokens if dtype is None else tokens.astype(dtype)

    def view(self, dtype: Any) -> "Shards":
        return Shards(self._files, dtype)

    def windows(self, starts: Ints, length: int) -> Ints:
        """Read the windows (N, length) that begin at `starts` (N,)."""
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            self._read_into(window, start)
        return windows

    def _read_into(self, target: Ints, start: int) -> None:
        """Fill an array with the tokens from `start` on."""
        read = 0
        index = bisect_right(self._begins, start) - 1
        while read < len(target):
            within = start + read - self._begins[index]
            tokens = self._map(self._files[index])[within : within + len(target) - read]
            target[read : read + len(tokens)] = tokens.view(self.dtype)
            read += len(tokens)
            index += 1
