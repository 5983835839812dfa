"""`python -m mingpt_ddp.snapshots` on a real S3 server, and on one that does not respond."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest
from launching import call
from snapshot_helpers import commit, small_snapshot
from store_limits import with_limits

from mingpt_ddp.snapshots.store import SnapshotStore


@pytest.fixture
def tool(seaweed, monkeypatch, tmp_path):
    """Return a function that runs the tool as a client of the server."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)

    def run(*args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return call([sys.executable, "-m", "mingpt_ddp.snapshots", *args], tmp_path, **extra)

    return run


def test_prune_lists_the_remaining_snapshots(tool, seaweed):
    """This server lists empty directories, unless they are deleted as well."""
    url = f"s3://{seaweed.make_bucket('pruned')}/run"
    store = SnapshotStore(f"{url}/snapshots")
    for step in (1, 2, 3, 4):
        commit(store, small_snapshot(step))
    done = tool("prune", url, "keep_last=1", "keep_best=false")
    assert done.returncode == 0 and done.stdout.endswith(f"{url}/snapshots: 3 deleted, 1 kept\n"), (
        done.stdout
    )
    assert store.steps() == [4]
    listed = tool("list", url).stdout.splitlines()
    assert [line.split()[:2] for line in listed[2:]] == [["4", "whole"]]
    assert tool("verify", url).stdout == f"{url}/snapshots/step_00000004: whole\n"


def test_a_server_that_does_not_respond(tool, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        path = with_limits(tmp_path / "site")
        done = tool("list", "s3://bucket/run", AWS_ENDPOINT_URL=endpoint, PYTHONPATH=path)
    assert done.returncode == 2
    *retries, error = done.stdout.splitlines()
    assert retries == ["retrying: no response in time"]
    assert re.fullmatch(r"storage error: cannot list snapshots at .* \(tried for \d+ s\)", error)
