"""Random numbers by key: what is drawn depends on the run's seed and its purpose, never on what was drawn before."""

from __future__ import annotations

import hashlib

import torch


def key_to_seed(*keys: int) -> int:
    """A 63-bit seed from whole numbers; any other keys give an unrelated seed."""
    digest = hashlib.blake2b(",".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*keys: int) -> None:
    """Make torch's global generators, on every device, a function of the keys."""
    torch.manual_seed(key_to_seed(*keys))
