"""Which trackers a run has."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.trackers.outboxes import TRACKERS, check_installed, open_outboxes


@pytest.fixture(scope="module")
def config() -> Config:
    return from_mapping(configure("tracker=[tensorboard,mlflow,wandb]"))


def test_one_outbox_per_tracker(config, tmp_path):
    names = [outbox._tracker.name for outbox in open_outboxes(config, tmp_path, "id")]
    assert sorted(names) == ["mlflow", "wandb"]


@pytest.mark.parametrize("missing", TRACKERS)
def test_a_missing_library_is_refused_where_it_is_needed(missing, config, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    if missing == "trackio":
        check_installed(config.tracker)
    else:
        with pytest.raises(
            ConfigError,
            match=rf"tracker={missing} is not installed; pip install 'mingpt_ddp\[{missing}\]'",
        ):
            check_installed(config.tracker)


@pytest.mark.parametrize(
    ("uri", "is_remote"),
    [("http://host:5000", True), ("sqlite:////tmp/x.db", False), (None, False)],
)
def test_the_end_waits_less_for_a_server(uri, is_remote, config, monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = replace(config, tracker=replace(config.tracker, uri=uri))
    assert TRACKERS["mlflow"](config, tmp_path, "id").is_remote == is_remote
