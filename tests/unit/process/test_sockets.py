"""The directory for multiprocessing's sockets, whose paths must be short even if TMPDIR is long."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launching import ROOT

from mingpt_ddp.process.sockets import LONGEST_TMPDIR

LISTEN = """
import multiprocessing
from multiprocessing import connection
from mingpt_ddp.process.sockets import make_socket_directory
def listen():
    print(connection.Listener(family="AF_UNIX").address, flush=True)
make_socket_directory()
make_socket_directory()
listen()
child = multiprocessing.get_context("fork").Process(target=listen)
child.start()
child.join()
"""
LOAD = """
import tempfile
import torch
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.samples import SampleLoader
config = DatasetConfig(name="own", dataset="own", num_workers=1)
loader = SampleLoader(torch.arange(4), config, batch_size=4, seed=1, on_gpu=False)
(batch,) = loader.get_batch(1, BatchPlan(4, 4, 1), 0)
print(sorted(batch.batch.tolist()))
loader.close()
"""


HOLD = """
from mingpt_ddp.process.sockets import make_socket_directory
from multiprocessing import util
make_socket_directory()
print(util.get_temp_dir(), flush=True)
input()
"""


def run(script: str, tmpdir: Path) -> str:
    environ = {"TMPDIR": str(tmpdir), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(("length", "where"), [(LONGEST_TMPDIR, ""), (LONGEST_TMPDIR + 1, "/tmp/")])
def test_one_directory_for_a_process_and_its_children(length, where):
    """On every system, the path of a socket may have 103 bytes."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        tmpdir = Path(f"{directory}/{'t' * (length - len(directory) - 1)}")
        tmpdir.mkdir()
        addresses = run(LISTEN, tmpdir).split()
        (used,) = {Path(address).parent for address in addresses}
        assert len({*addresses}) == 2
        assert str(used).startswith(where or f"{tmpdir}/")
        assert not used.exists()
        assert [*tmpdir.iterdir()] == []


def test_a_start_deletes_the_directories_of_killed_processes():
    """It keeps directories of living processes, and directories that others have made."""
    with tempfile.TemporaryDirectory(prefix="t-") as tmpdir:
        Path(tmpdir, "mingpt-12345678-other-boot").mkdir()
        environ = {"TMPDIR": tmpdir, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", HOLD]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        killed, living = (subprocess.Popen(command, env=environ, **pipes) for _ in range(2))
        left, used = (Path(process.stdout.readline().strip()) for process in (killed, living))
        killed.kill()
        killed.communicate()
        assert left.exists()
        run(LISTEN, Path(tmpdir))
        assert (left.exists(), used.exists()) == (False, True)
        living.communicate("\n")
        assert [path.name for path in Path(tmpdir).iterdir()] == ["mingpt-12345678-other-boot"]


def test_loader_processes_with_a_long_tmpdir(tmp_path):
    tmpdir = tmp_path / ("t" * 100)
    tmpdir.mkdir()
    assert run(LOAD, tmpdir) == "[0, 1, 2, 3]\n"
    assert [*tmpdir.iterdir()] == []
