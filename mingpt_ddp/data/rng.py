"""Random numbers by key: what is drawn depends on the run's seed and its purpose, never on what was drawn before."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

Ints = np.ndarray[Any, np.dtype[Any]]
ROUNDS = 6


def derive_seed(*keys: int | str) -> int:
    """A 63-bit seed from what it is for and some numbers; any other keys give an unrelated seed."""
    digest = hashlib.blake2b(",".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*keys: int | str) -> None:
    """Make torch's global generators, on the CPU and on every GPU in use, a function of the keys."""
    seed = derive_seed(*keys)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # torch.manual_seed would note down a stack trace for a GPU that is not in use
        torch.cuda.manual_seed_all(seed)


def feistel_permute(positions: Ints, n: int, key: int) -> Ints:
    """Where a keyed permutation of 0 .. n - 1 sends each position; needs no memory beyond its result.

    A Feistel network over the next even number of bits, walked again from every value that falls outside (Black and
    Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). At least one value in four
    is inside.

    Args:
        positions: integers in 0 .. n - 1, any shape.
    """
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    keys = [np.uint64(derive_seed("round", key, number)) for number in range(ROUNDS)]
    values = _encipher(positions.astype(np.uint64), half, keys)
    while (outside := values >= n).any():
        values[outside] = _encipher(values[outside], half, keys)
    return values.astype(np.int64)


def _encipher(values: Ints, half: np.uint64, keys: list[np.uint64]) -> Ints:
    """A bijection on integers of 2 * half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half | right


def _mix(x: Ints) -> Ints:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of input moves every bit of output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
