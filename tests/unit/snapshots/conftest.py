"""Fixtures for a store of snapshots, on a local disk and in memory."""

import uuid

import pytest

from mingpt_ddp.snapshots.write.store import SnapshotStore


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    return (
        str(tmp_path / "run" / "snapshots")
        if request.param == "file"
        else f"memory://{uuid.uuid4().hex}/snapshots"
    )


@pytest.fixture
def store(url):
    return SnapshotStore(url)
