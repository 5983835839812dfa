"""Draw random numbers by key: each draw depends on the seed and its key, never on earlier draws."""

import hashlib
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[Any]]
FEISTEL_ROUNDS = 6  # rounds of the Feistel network in `feistel_permute`


def derive_seed(*keys: int | str) -> int:
    """Hash keys, such as a purpose and a step, to a 63-bit seed.

    Different keys give independent seeds.
    """
    digest = hashlib.blake2b(",".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*keys: int | str) -> None:
    """Seed torch's global generators, on the CPU and on every GPU in use, from keys."""
    # Importing torch takes seconds. Some code that reads texts does not need it.
    import torch

    seed = derive_seed(*keys)
    torch.default_generator.manual_seed(seed)
    # Before CUDA is initialized, torch would only record the call, with its stack trace.
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def feistel_permute(positions: Ints, n: int, key: int) -> Ints:
    """Permute positions in 0 .. n - 1 by a key, without a table of n entries.

    A Feistel network permutes all numbers of the next even number of bits. It is applied again to
    values that are out of range (cycle walking: Black and Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains"). At least one value in four is in range.

    Args:
        positions: Integers in 0 .. n - 1, in any shape.
        n: Number of positions that are permuted.
        key: Seed that decides the permutation.

    Returns:
        The new position of each position, as int64.
    """
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    keys = [np.uint64(derive_seed("round", key, i)) for i in range(FEISTEL_ROUNDS)]
    values = _encipher(positions.astype(np.uint64), half, keys)
    while (outside := values >= n).any():
        values[outside] = _encipher(values[outside], half, keys)
    return values.astype(np.int64)


def _encipher(values: Ints, half: np.uint64, keys: list[np.uint64]) -> Ints:
    """Apply the Feistel network. It is a bijection on integers of 2 * half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = values >> half
    right = values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half | right


def _mix(x: Ints) -> Ints:
    """Apply the finalizer of SplitMix64: every input bit affects every output bit.

    Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
