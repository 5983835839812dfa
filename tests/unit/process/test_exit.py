"""Exit codes after signals, torchrun's error file, and the report of another rank's failure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from launching import ROOT, environment

from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.exit import EX_TEMPFAIL, FAILURE, signal_exit_code
from mingpt_ddp.process.failures import RankFailure
from mingpt_ddp.process.root_cause import ProcessExit

# exit codes of signals that arrive before training has started
EARLY = 128 + signal.SIGTERM, 128 + signal.SIGUSR1


def test_without_slurm_the_exit_code_is_kept(monkeypatch):
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    assert [signal_exit_code(DistEnv(), code) for code in (0, *EARLY)] == [0, *EARLY]


@pytest.mark.parametrize(
    ("standalone", "codes"), [(True, [EX_TEMPFAIL, EX_TEMPFAIL, EARLY[1]]), (False, [0, *EARLY])]
)
def test_a_slurm_job_asks_for_a_requeue_but_its_workers_do_not(standalone, codes, monkeypatch):
    """A job whose time limit was reached before training started does not ask either."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert [
        signal_exit_code(DistEnv(is_standalone=standalone), code) for code in (0, *EARLY)
    ] == codes


def test_torchrun_finds_the_error_in_its_file(tmp_path):
    program = "from mingpt_ddp.process.root_cause import ProcessExit, exit_with\n"
    program += "exit_with(ProcessExit().outcome_of(ValueError('the cause')))"
    file = tmp_path / "error.json"
    env = environment(tmp_path, PYTHONPATH=str(ROOT), TORCHELASTIC_ERROR_FILE=str(file))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env)
    assert done.returncode == FAILURE
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: the cause"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RankFailure(1, "ConfigError", "config error: x=1 is bad"), "config error: x=1 is bad"),
        (
            RankFailure(1, "", "config error: of a user's exception"),
            "error: rank 1: config error: of a user's exception",
        ),
        (RankFailure(1, "UserError", "error: plain"), "error: plain"),
    ],
)
def test_the_class_of_a_peer_s_error_decides_if_it_is_a_user_error(failure, expected, caplog):
    ProcessExit().log_peer_failure(failure)
    assert caplog.messages == [expected]
