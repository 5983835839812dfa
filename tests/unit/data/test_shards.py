"""Several token files are read as if they were one array."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mingpt_ddp.data.dataloader import BatchPlan, TokenLoader, TokenSplit
from mingpt_ddp.data.tokens.shards import Shards
from mingpt_ddp.data.tokens.token_files import TokenFile

SIZES = (5, 1, 40, 2, 300)
TOKENS = np.random.default_rng(1).integers(0, 1 << 16, sum(SIZES), np.uint16)


@pytest.fixture(params=[1, 128])
def shards(request, tmp_path, monkeypatch):
    """Return a function that writes tokens to several files.

    Depending on the parameter, few or all of them can be memory-mapped at the same time.
    """
    monkeypatch.setattr("mingpt_ddp.data.tokens.shards.MAX_MAPPED_FILES", request.param)

    def write(dtype: str = "uint16") -> Shards:
        files = []
        for part in np.split(TOKENS.astype(dtype), np.cumsum(SIZES)[:-1]):
            path = tmp_path / f"{len(files)}.bin"
            path.write_bytes(b"head" + part.tobytes())
            files.append(TokenFile(str(path), dtype, 4, len(part)))
        return Shards(files, dtype)

    return write


def test_a_slice_equals_the_slice_of_the_joined_array(shards):
    whole = shards()
    assert len(whole) == len(TOKENS) and whole.nbytes == TOKENS.nbytes
    ends = [0, 1, 4, 5, 6, 7, 46, 47, 48, 347, 348, 999, -1, -300, None]
    for begin, end in itertools.product(ends, ends):
        part = whole[begin:end]
        expected = TOKENS[begin:end]
        assert len(part) == len(expected) and part.dtype == expected.dtype
        assert np.array_equal(np.array(part), expected)
        assert np.array_equal(np.array(part[1:50]), expected[1:50])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_batches_equal_those_from_one_array(dtype, shards):
    plan = BatchPlan(batch_size=4, micro_batch_size=4, world_size=1)
    tokens = TOKENS.astype(dtype)
    loaders = [TokenLoader(each, 8, 3, 4, seed=1) for each in (tokens, shards(dtype))]
    for step in range(1, 40):
        [one], [other] = (loader.get_batch(step, plan, 0) for loader in loaders)
        assert torch.equal(one.batch[0], other.batch[0])
        assert torch.equal(one.batch[1], other.batch[1])
    device = torch.device("cpu")
    splits = [TokenSplit(each, 8, device).batches(0, 1) for each in (tokens, shards(dtype))]
    for one, other in zip(*splits, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[1].max() < 1 << 16
