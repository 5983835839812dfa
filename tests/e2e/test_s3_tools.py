"""`python -m mingpt_ddp.snapshots` on a real S3 server, and on one that does not respond."""

from __future__ import annotations

import re
import socket
import subprocess

import pytest
from launching import TINY, call
from runs import tool, train
from store_limits import with_limits


@pytest.fixture
def snapshots(seaweed, monkeypatch, tmp_path):
    """Return a function that runs the tool as a client of the server."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)

    def run(*args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return call(tool("snapshots", *args), tmp_path, **extra)

    return run


def test_prune_lists_the_remaining_snapshots(snapshots, seaweed, tmp_path):
    """This server lists empty directories, unless they are deleted as well."""
    path = f"s3://{seaweed.make_bucket('pruned')}/runs"
    train(tmp_path, *TINY, f"snapshot.path={path}", "snapshot.keep_last=9")  # steps 4, 6, 8, 12
    pruned = snapshots("prune", f"{path}/run", "keep_last=1", "keep_best=false")
    assert pruned.stdout.endswith(f"{path}/run: 3 deleted, 1 kept\n"), pruned.stdout
    listed = snapshots("list", f"{path}/run").stdout.splitlines()
    assert [line.split()[:2] for line in listed[2:]] == [["12", "whole"]]
    assert snapshots("verify", f"{path}/run").stdout == f"{path}/run/step_00000012: whole\n"


def test_a_server_that_does_not_respond(snapshots, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        path = with_limits(tmp_path / "site")
        done = snapshots("list", "s3://bucket/run", AWS_ENDPOINT_URL=endpoint, PYTHONPATH=path)
    assert done.returncode == 2
    *retries, error = done.stdout.splitlines()
    assert retries == ["retrying: no response in time"]
    assert re.fullmatch(r"storage error: cannot list snapshots at .* \(tried for \d+ s\)", error)
