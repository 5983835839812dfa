"""The sweep commands in the documents are accepted. Each is tried with its last values."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from launching import ROOT
from omegaconf import OmegaConf

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.compose.resolve import to_job
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.study.sweeps.checks import expand
from mingpt_ddp.study.sweeps.search.space import search_space
from mingpt_ddp.study.sweeps.settings import check_settings


def commands() -> list[str]:
    found = []
    for page in ("README.md", "docs/sweeps.md"):
        text = (ROOT / page).read_text()
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", "").splitlines()
            found += [line for line in lines if " main.py -m " in line]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_starts_a_sweep(command):
    if "slurm" in command:
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = shlex.split(command, comments=True)
    has_ranks = words[0] == "torchrun"
    env = DistEnv(world_size=2 if has_ranks else 1, is_standalone=not has_ranks)
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides = parser.parse_overrides(words[words.index("-m") + 1 :])
        job = [expand(override)[-1] for override in overrides]
        composed = compose("config", job, return_hydra_config=True)
    keys = OmegaConf.masked_copy(composed, composed.keys() - {"hydra"})
    config = to_job(keys, composed.hydra, job).config
    settings = check_settings(composed, [config], env)
    assert not settings.is_search or search_space(overrides) or "optuna_lr" in command
