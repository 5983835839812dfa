"""The fork server of the workers has one socket in TMPDIR, however often it is started."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from launching import PATIENCE_S, ROOT, environment

PROGRAM = """
import multiprocessing, os, tempfile
from pathlib import Path
from mingpt_ddp.distributed.launch.fork_server import start_server, stop_server
from mingpt_ddp.storage.sockets import make_socket_directory

def fork():
    worker = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    worker.start()
    worker.join()
    assert worker.exitcode == 0

def sockets():
    return [path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_socket()]

if __name__ == "__main__":
    make_socket_directory()
    start_server()
    [first] = sockets()
    fork()
    files = os.listdir("/proc/self/fd")
    for _ in range(2):
        stop_server()
        start_server()
        start_server()
        fork()
    [last] = sockets()
    assert last != first
    assert len(os.listdir("/proc/self/fd")) == len(files)
    stop_server()
"""


def test_a_server_that_starts_again_has_one_socket(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="t-") as directory:  # short, as paths of sockets are
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=environment(tmp_path, PYTHONPATH=str(ROOT), TMPDIR=directory),
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
