"""What a job of a sweep returns that an earlier start has completed."""

from __future__ import annotations

import json
import math

import yaml
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import from_mapping, to_plain
from mingpt_ddp.results.objective import BITS_PER_BYTE, LOSS
from mingpt_ddp.sweeps.job import look_up


def test_a_complete_job_has_its_objective(tmp_path):
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        config = from_mapping(to_plain(compose("config", [f"run.root={tmp_path}", "run.name=a"])))
    name, value = look_up(config, {"optimizer.lr": "1"}, LOSS)
    assert value is None
    job = tmp_path / name
    job.mkdir(parents=True)
    (job / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    for measured, expected in (
        ({"val_loss": 2.0, "val_bits_per_byte": 2.5}, [2.0, 2.5]),
        ({"val_loss": 2.0}, [2.0, math.inf]),  # complete, and ranked last
        ({"val_loss": None, "val_bits_per_byte": 2.5}, [None, None]),
    ):
        (job / "result.json").write_text(json.dumps({"status": "complete", "step": 1, **measured}))
        found = [look_up(config, {"optimizer.lr": "1"}, each) for each in (LOSS, BITS_PER_BYTE)]
        assert found == [(name, final) for final in expected]
