"""Another Hydra application can use the configuration groups, and train with what it composes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from launching import TINY
from multiprocess.ranks import configure
from omegaconf import OmegaConf

import mingpt_ddp
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import run_name
from mingpt_ddp.errors import ConfigError

AT_THE_TOP = """
hydra:
  searchpath: [pkg://mingpt_ddp.conf]
defaults:
  - mingpt_ddp
  - _self_
note: ???  # a key of the application
rate: 1e-3
optimizer:
  lr: ${rate}
"""


def test_equal_settings_give_the_same_run_name(tmp_path, monkeypatch):
    """e2e/test_api.py trains with the groups below a node of the application's configuration."""
    (tmp_path / "app.yaml").write_text(AT_THE_TOP)
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        cfg = compose("app", [*TINY, "trainer.device=cpu", "snapshot.every_minutes=1e-5"])
    before = OmegaConf.to_yaml(cfg)
    monkeypatch.chdir(tmp_path)
    result = mingpt_ddp.train(cfg)
    assert OmegaConf.to_yaml(cfg) == before
    run = Path(result["run"])
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    expected = configure(*TINY, "optimizer.lr=1e-3")
    assert recorded["snapshot"]["every_minutes"] == 1e-5
    assert recorded["optimizer"] == expected["optimizer"]
    assert run.name == run_name(from_mapping(expected))


@pytest.mark.parametrize(
    ("text", "node", "error"),
    [
        (
            "trainer: {}\nmodel: ???",
            None,
            "the configuration does not have the group run, model, optimizer, data, ddp, snapshot; "
            "compose the configuration mingpt_ddp, and pass the node with its groups to train "
            "(docs/python.md)",
        ),
        ("gpt: {model: 5}", "gpt", "gpt does not have the group run, model, optimizer, "),
        ("gpt: {optimiser: {}}", "gpt", "gpt.optimiser is not a key; did you mean optimizer?"),
        ("run: {name: '${nothing}'}", None, "run.name: Interpolation key 'nothing' not found"),
    ],
)
def test_incomplete_groups_and_unknown_keys_are_refused(tmp_path, text, node, error, monkeypatch):
    cfg = OmegaConf.create(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        mingpt_ddp.train(cfg[node] if node else cfg)
    assert str(refused.value).startswith(f"config error: {error}")
    assert not [*tmp_path.iterdir()]


def test_other_hydra_applications_do_not_import_the_package():
    """Hydra imports the plugins of all installed packages at every start."""
    script = """
import sys
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
Plugins.instance()
print([name for name in sys.modules if name.startswith("mingpt_ddp")])
print("hydra_plugins.mingpt_ddp_sweeper" in sys.modules)
print("mingpt" in str(ConfigStore.instance().repo))
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\nTrue\nFalse\n"), done.stderr
