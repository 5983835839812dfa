"""Processes that load samples leave no files and accept no connection of another user."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection

import pytest
import torch

from mingpt_ddp.config.components import DatasetConfig
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.loader_process import share_without_files
from mingpt_ddp.data.samples import SampleLoader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")


def test_a_running_loader_has_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", None)
    config = DatasetConfig(name="own", dataset="own", num_workers=1)
    loader = SampleLoader(torch.arange(4), config, batch_size=4, seed=1, on_gpu=False)
    (batch,) = loader.get_batch(1, BatchPlan(4, 4, 1), 0)
    assert sorted(batch.batch.tolist()) == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == []
    loader.close()


def test_processes_of_other_users_are_refused(monkeypatch):
    for owner, name in ((connection.SocketListener, "accept"), (connection, "arbitrary_address")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored at the end
    share_without_files()
    assert connection.arbitrary_address("AF_INET") == ("localhost", 0)
    users = iter([os.getuid() + 1, os.getuid()])
    with connection.Listener(family="AF_UNIX") as listener, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(os, "getuid", lambda: next(users))
        accepted = pool.submit(listener.accept)
        with connection.Client(listener.address) as refused:
            assert refused.poll(60), "it is neither served nor refused"
            with pytest.raises(EOFError):
                refused.recv()
        with connection.Client(listener.address) as client, accepted.result() as served:
            served.send("hello")
            assert client.recv() == "hello"
