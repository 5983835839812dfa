import hashlib

import torch

from mingpt_ddp.snapshots.hashes import sha256_of_tensors


def test_sha256_is_of_names_shapes_types_and_bytes():
    """Runs record it: it stays from version to version."""
    content = b"a (2, 1) torch.int16" + b"\x01\x00\x02\x00" + b"b () torch.bool" + b"\x01"
    column = torch.tensor([[1, 0], [2, 0]], dtype=torch.int16)[:, :1]
    tensors = {"b": torch.tensor(True), "a": torch.nn.Parameter(column, requires_grad=False)}
    assert sha256_of_tensors(tensors) == hashlib.sha256(content).hexdigest()
