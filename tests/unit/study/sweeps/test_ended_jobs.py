"""The values that a sweep returns for jobs which an earlier start has completed."""

from __future__ import annotations

import json
import math

import yaml
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import from_mapping, to_plain
from mingpt_ddp.config.job import Job, job_name
from mingpt_ddp.study.results.objective import BITS_PER_BYTE, LOSS
from mingpt_ddp.study.sweeps.ended_jobs import final_value


def test_a_complete_job_has_its_objective(tmp_path):
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        config = from_mapping(to_plain(compose("config", [f"run.root={tmp_path}", "run.name=a"])))
    job = Job(config).with_run(name=job_name(config, {"optimizer.lr": "1"}))
    assert final_value(job, LOSS) is None
    job.directory.mkdir(parents=True)
    (job.directory / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    for measured, expected in (
        ({"val_loss": 2.0, "val_bits_per_byte": 2.5}, [2.0, 2.5]),
        ({"val_loss": 2.0}, [2.0, math.inf]),  # complete, but without this number, so ranked last
        ({"val_loss": None, "val_bits_per_byte": 2.5}, [None, None]),
    ):
        (job.directory / "result.json").write_text(
            json.dumps({"status": "complete", "step": 1, **measured})
        )
        assert [final_value(job, each) for each in (LOSS, BITS_PER_BYTE)] == expected
