"""The fork server of the workers leaves no files, not even if it and its parent are killed."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import pytest

from mingpt_ddp.distributed import fork_server


@pytest.fixture
def tmpdir(monkeypatch):
    """An empty TMPDIR with a short path, and no fork server yet, which imports nothing."""
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    for name in ("set_forkserver_preload", "ensure_running", "connect_to_new_process"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(fork_server, "PRELOADED", [])
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", None)
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)
        server._stop()


def fork() -> int | None:
    worker = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    worker.start()
    worker.join()
    return worker.exitcode


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_running_server_has_no_files(tmpdir):
    fork_server.start_server()
    assert list(tmpdir.iterdir()) == []
    assert fork() == 0
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        fork_server.stop_server()
        fork_server.start_server()
        fork_server.start_server()
        assert fork() == 0
    assert list(tmpdir.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
    fork_server.stop_server()


def test_a_server_where_only_names_can_be_connected_to(tmpdir, monkeypatch):
    monkeypatch.setattr(fork_server, "_connects_by_descriptor", lambda directory: False)
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", str(tmpdir))
    fork_server.start_server()
    assert [path.name.partition("-")[0] for path in tmpdir.iterdir()] == ["listener"]
    assert fork() == 0
    fork_server.stop_server()
    fork_server.start_server()
    assert fork() == 0
