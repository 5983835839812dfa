"""The fork server of the workers has one socket in TMPDIR, however often it is started."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import pytest

from mingpt_ddp.distributed.launch import fork_server


@pytest.fixture
def sockets(monkeypatch):
    """The directory of sockets, and no fork server yet, which imports nothing."""
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    for name in ("set_forkserver_preload", "ensure_running", "connect_to_new_process"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(fork_server, "PRELOADED", [])
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        settings = vars(multiprocessing.current_process())["_config"]
        monkeypatch.setitem(settings, "tempdir", directory)
        yield Path(directory)
        server._stop()


def fork() -> int | None:
    worker = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    worker.start()
    worker.join()
    return worker.exitcode


def test_a_server_that_starts_again_has_one_socket(sockets):
    fork_server.start_server()
    (first,) = sockets.iterdir()
    assert first.is_socket()
    assert fork() == 0
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        fork_server.stop_server()
        fork_server.start_server()
        fork_server.start_server()
        assert fork() == 0
    (last,) = sockets.iterdir()
    assert last != first
    assert len(os.listdir("/proc/self/fd")) == len(before)
    fork_server.stop_server()
