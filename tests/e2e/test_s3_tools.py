"""Check `mingpt_ddp snapshots` on a real S3 server, and on a server that does not respond."""

from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
import threading

import pytest
import s3fs
from launching import PATIENCE_S, TINY, call
from runs import tool, train
from store_limits import with_limits


@pytest.fixture
def snapshots(seaweed, monkeypatch, tmp_path):
    """Return a function that runs the command as a client of the server."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)

    def run(*args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return call(tool("snapshots", *args), tmp_path, **extra)

    return run


def test_prune_lists_the_remaining_snapshots(snapshots, seaweed, tmp_path):
    """This server lists empty directories unless they are deleted too."""
    path = f"s3://{seaweed.make_bucket('pruned')}/runs"
    # The run saves steps 4, 6, 8 and 12.
    train(tmp_path, *TINY, f"snapshot.path={path}", "snapshot.keep_last=9")
    pruned = snapshots("prune", f"{path}/run", "keep_last=1", "keep_best=false")
    assert pruned.stdout.endswith(f"{path}/run: 3 deleted, 1 kept\n"), pruned.stdout
    listed = snapshots("list", f"{path}/run").stdout.splitlines()
    assert [line.split()[:2] for line in listed[2:]] == [["12", "whole"]]
    assert snapshots("verify", f"{path}/run").stdout == f"{path}/run/step_00000012: whole\n"


def test_prune_refuses_while_a_lease_is_alive(snapshots, seaweed, tmp_path):
    """The owner of the lease is a thread here, which sends heartbeats while the command waits."""
    path = f"{seaweed.make_bucket('owned')}/runs"
    train(tmp_path, *TINY, f"snapshot.path=s3://{path}", "snapshot.keep_last=9")
    variables = seaweed.environment()
    client = s3fs.S3FileSystem(
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        key=variables["AWS_ACCESS_KEY_ID"],
        secret=variables["AWS_SECRET_ACCESS_KEY"],
        skip_instance_cache=True,
    )
    begun, ended = threading.Event(), threading.Event()

    def own() -> None:
        for count in itertools.count():
            record = {"id": "theirs", "owner": "process 7 on there", "heartbeat": count}
            client.pipe_file(f"{path}/run/owner.json", json.dumps(record).encode())
            begun.set()
            if ended.wait(0.2):
                return

    owner = threading.Thread(target=own)
    owner.start()
    try:
        assert begun.wait(PATIENCE_S)
        done = snapshots("prune", f"s3://{path}/run", "keep_last=1", "keep_best=false")
    finally:
        ended.set()
        owner.join()
    assert done.returncode == 2
    assert "is locked by process 7 on there, which is still running" in done.stdout
    assert len(snapshots("list", f"s3://{path}/run").stdout.splitlines()) == 2 + 4


def test_a_server_that_does_not_respond(snapshots, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        path = with_limits(tmp_path / "site")
        done = snapshots("list", "s3://bucket/run", AWS_ENDPOINT_URL=endpoint, PYTHONPATH=path)
    assert done.returncode == 2
    *retries, error = done.stdout.splitlines()
    assert retries == ["retrying: no response in time"]
    assert re.fullmatch(r"storage error: cannot list snapshots at .* \(tried for \d+ s\)", error)
