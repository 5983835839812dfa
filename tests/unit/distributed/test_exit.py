"""The exit codes, and the error file of torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from launching import is_running, wait_for

from mingpt_ddp.distributed import exit as exit_module
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import EX_TEMPFAIL, FAILURE, ProcessExit, signal_exit_code
from mingpt_ddp.distributed.group.failures import Failure

EARLY = 128 + signal.SIGTERM, 128 + signal.SIGUSR1  # before training has started


def test_without_slurm_the_exit_code_is_kept(monkeypatch):
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    assert [signal_exit_code(DistEnv(), code) for code in (0, *EARLY)] == [0, *EARLY]


@pytest.mark.parametrize(
    ("standalone", "codes"), [(True, [EX_TEMPFAIL, EX_TEMPFAIL, EARLY[1]]), (False, [0, *EARLY])]
)
def test_a_slurm_job_asks_for_a_requeue_but_its_workers_do_not(standalone, codes, monkeypatch):
    """Nor does a job whose time limit was reached before training started."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert [
        signal_exit_code(DistEnv(is_standalone=standalone), code) for code in (0, *EARLY)
    ] == codes


def test_torchrun_finds_the_error_in_its_file(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(exit_module, "exit_process", lambda message, code: sys.exit(code))
    with pytest.raises(SystemExit) as ended:
        ProcessExit().failure(ValueError("the cause"))
    assert ended.value.code == FAILURE
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: the cause"


LAUNCHER = """
import multiprocessing, os, sys, time
from pathlib import Path
from mingpt_ddp.distributed.exit import die_with_parent

def work():
    die_with_parent()
    Path("pid").write_text(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    worker = multiprocessing.get_context("forkserver").Process(target=work)
    worker.start()
    worker.join()
"""


def test_a_forked_worker_dies_with_the_launcher(tmp_path):
    """Also where the fork server lives on, because it could not import this package."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    launcher = subprocess.Popen([sys.executable, "launcher.py"], cwd=tmp_path)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_the_end_of_a_process_makes_no_directory(monkeypatch):
    """Killed meanwhile, it would leave one in TMPDIR."""
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", None)
    monkeypatch.setattr(tempfile, "mkdtemp", pytest.fail)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(exit_module.logs, "close", lambda: None)
    exit_module.exit_process(None, 0)


def test_the_end_of_a_process_deletes_its_sockets(tmp_path, monkeypatch):
    monkeypatch.setitem(
        vars(multiprocessing.current_process())["_config"], "tempdir", str(tmp_path / "sockets")
    )
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(exit_module.logs, "close", lambda: None)
    (tmp_path / "sockets").mkdir()
    exit_module.exit_process(None, 0)
    assert not (tmp_path / "sockets").exists()


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(1, "ConfigError", "config error: x=1 is bad"), "config error: x=1 is bad"),
        (
            Failure(1, "", "config error: of a user's exception"),
            "error: rank 1: config error: of a user's exception",
        ),
        (Failure(1, "UserError", "error: plain"), "error: plain"),
    ],
)
def test_a_peer_s_failure_is_a_user_error_by_its_class_not_by_its_text(failure, expected, caplog):
    ProcessExit().log_peer_failure(failure)
    assert caplog.messages == [expected]
