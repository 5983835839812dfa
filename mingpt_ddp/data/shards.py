"""Tokens that lie in several files, as one array."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np

from mingpt_ddp.data.rng import Ints


class Shards:
    """Arrays of one type, none of them empty, read as one; no token is copied before it is asked
    for.
    """

    def __init__(self, arrays: list[Ints]) -> None:
        self.arrays = arrays
        self.dtype = arrays[0].dtype
        self.itemsize = self.dtype.itemsize
        self._begins = [0, *accumulate(map(len, arrays))]  # and the end

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def nbytes(self) -> int:
        return len(self) * self.itemsize

    def __getitem__(self, part: slice) -> Any:
        """Return the tokens of a slice without a step: an array if they lie in one file."""
        begin, end, _ = part.indices(len(self))
        first = bisect_right(self._begins, begin, hi=len(self.arrays)) - 1
        last = bisect_right(self._begins, max(begin, end - 1), hi=len(self.arrays)) - 1
        inside = slice(begin - self._begins[first], max(begin, end) - self._begins[first])
        if first == last:
            return self.arrays[first][inside]
        head = self.arrays[first][inside.start :]
        tail = self.arrays[last][: end - self._begins[last]]
        return Shards([head, *self.arrays[first + 1 : last], tail])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        return np.concatenate(self.arrays, dtype=dtype)

    def view(self, dtype: Any) -> "Shards":
        return Shards([array.view(dtype) for array in self.arrays])

    def windows(self, starts: Ints, length: int) -> Ints:
        """Return the windows (N, length) that begin at `starts` (N,)."""
        windows = np.empty((len(starts), length), self.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            window[:] = self[start : start + length]
        return windows
