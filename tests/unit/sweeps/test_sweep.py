"""Checks of a sweep before its first job."""

from __future__ import annotations

import pytest

from mingpt_ddp.distributed.exit import ProcessExit


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Start the search; raise the error that would end the process."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    def fail(self, error):
        raise error

    monkeypatch.setattr(ProcessExit, "user_error", fail)
