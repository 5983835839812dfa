"""Fixtures for the snapshots command: run directories, and a function that calls the command."""

from __future__ import annotations

import uuid

import pytest
from tools import call_tool

from mingpt_ddp.cli.commands import snapshots as tool


@pytest.fixture(params=["file", "memory"])
def run(request, tmp_path):
    """Return the URL of a run directory."""
    return str(tmp_path / "run") if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)
