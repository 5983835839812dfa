"""The groups in another Hydra application, and the words that train with its configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import mingpt_ddp
from mingpt_ddp.cli.application import application_words
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.run_directory import run_name

pytestmark = pytest.mark.core

AT_THE_TOP = """
hydra:
  searchpath: [pkg://mingpt_ddp.conf]
defaults:
  - mingpt_ddp
  - _self_
note: ???  # of the application alone
rate: 1e-3
optimizer:
  lr: ${rate}
"""
IN_A_NODE = AT_THE_TOP.replace("mingpt_ddp\n", "mingpt_ddp@gpt\n").replace(
    "optimizer:\n  lr", "gpt:\n  optimizer:\n    lr"
)
CHANGES = ("model=modern_nano", "run.seed=7", "snapshot.every_minutes=1e-5", "run.name=${.root}")


def compose_own(directory: Path, text: str, *words: str) -> DictConfig:
    """Compose the configuration of an application."""
    (directory / "app.yaml").write_text(text)
    with initialize_config_dir(str(directory), **VERSION_BASE):
        return compose("app", list(words))


def compose_ours(*words: str) -> Config:
    """Compose the configuration of a command line, with --config-dir as a search path."""
    overrides = [
        f"hydra.searchpath=[{word.partition('=')[2]}]" if word.startswith("--") else word
        for word in words
    ]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", overrides)))


def test_the_same_settings_are_the_same_run(tmp_path):
    ours = compose_ours("model=modern_nano", "run.seed=7", "optimizer.lr=1e-3")
    in_node = [f"gpt.{word}" for word in CHANGES[1:]]
    for text, words in (
        (AT_THE_TOP, CHANGES),
        (IN_A_NODE, ["model@gpt.model=modern_nano", *in_node]),
    ):
        directory = tmp_path / str(len(words[0]))
        directory.mkdir()
        cfg = compose_own(tmp_path, text, *words)
        before = OmegaConf.to_yaml(cfg)
        part = cfg if text is AT_THE_TOP else cfg.gpt
        part.snapshot.path = "a 1e-3 'ü'"
        config = compose_ours(*application_words(part, directory))
        part.snapshot.path = None
        assert OmegaConf.to_yaml(cfg) == before
        assert config.snapshot.path == "a 1e-3 'ü'"
        assert (config.run.name, config.snapshot.every_minutes) == ("outputs", 1e-5)
        assert config.digest() == ours.digest() and config.data == ours.data
        assert run_name(ours).startswith("python_docs-modern_nano-")


@pytest.mark.parametrize(
    ("text", "node", "error"),
    [
        (
            "trainer: {}\nmodel: ???",
            None,
            "the configuration has no group run, model, optimizer, data, ddp, snapshot; compose "
            "mingpt_ddp, and give train the node that holds its groups (docs/python.md)",
        ),
        ("gpt: {model: 5}", "gpt", "gpt has no group run, model, optimizer, data, ddp, trainer, "),
        ("gpt: {optimiser: {}}", "gpt", "gpt.optimiser is not a key; did you mean optimizer?"),
        ("run: {name: '${nothing}'}", None, "run.name: Interpolation key 'nothing' not found"),
    ],
)
def test_what_is_refused(tmp_path, text, node, error, monkeypatch):
    cfg = OmegaConf.create(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        mingpt_ddp.train(cfg[node] if node else cfg)
    assert str(refused.value).startswith(f"config error: {error}")
    assert not [*tmp_path.iterdir()]


def test_other_applications_see_nothing():
    """Hydra imports the plugins of all packages at every start."""
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
