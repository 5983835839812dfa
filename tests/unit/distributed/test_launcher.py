"""The exit code after attempts of local workers, whether a signal came, and the workers' environment."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from mingpt_ddp.distributed.exit import EX_TEMPFAIL, FAILURE, USER_ERROR
from mingpt_ddp.distributed.launcher import WorkerExit, _environment, _run_with_restarts


@pytest.fixture
def attempts(tmp_path):
    """Attempts that end as given, each behind a result that the workers leave, if any."""

    def run(*endings: tuple[WorkerExit, dict | None], before: dict | None = None) -> tuple[int, bool]:
        waiting = iter(endings)

        def leave(result: dict | None) -> None:
            if result is not None:
                (tmp_path / "result.json").write_text(json.dumps(result))

        def attempt() -> WorkerExit:
            ending, result = next(waiting)
            leave(result)
            return ending

        leave(before)
        done = _run_with_restarts(attempt, 1, tmp_path)
        assert next(waiting, None) is None, "there was one attempt too few"
        return done

    return run


SIGNALLED = WorkerExit(signal=signal.SIGTERM)
COMPLETE, PREEMPTED = {"status": "complete", "step": 9}, {"status": "preempted", "step": 5}


def test_success(attempts):
    assert attempts((WorkerExit(), COMPLETE)) == (0, False)
    assert attempts((WorkerExit(1), None), (WorkerExit(), COMPLETE)) == (0, False)


def test_a_signal(attempts):
    assert attempts((SIGNALLED, PREEMPTED)) == (0, True)
    assert attempts((SIGNALLED, COMPLETE), before=PREEMPTED) == (0, True), "the signal came too late for the run"


def test_a_signal_before_anything_was_done(attempts):
    assert attempts((SIGNALLED, None)) == (128 + signal.SIGTERM, True)
    assert attempts((SIGNALLED, None), before=COMPLETE) == (128 + signal.SIGTERM, True), "that was another start"


def test_a_user_error_is_not_retried(attempts):
    assert attempts((WorkerExit(USER_ERROR), None)) == (USER_ERROR, False)


def test_all_restarts_used_up(attempts):
    assert attempts((WorkerExit(-signal.SIGKILL), None), (WorkerExit(1), None)) == (FAILURE, False)
    assert attempts((WorkerExit(EX_TEMPFAIL), None), (WorkerExit(EX_TEMPFAIL), None)) == (USER_ERROR, False)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_local_workers_use_the_loopback_interface(name, local, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    with _environment(2, local):
        assert os.environ.get(name) == (("lo0" if sys.platform == "darwin" else "lo") if local else None)
    assert name not in os.environ
    monkeypatch.setenv(name, "eth0")
    with _environment(2, local):
        assert os.environ[name] == "eth0", "the user has chosen another one"
