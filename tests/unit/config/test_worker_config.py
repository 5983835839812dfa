"""Workers get the configuration that their parent has composed, as if Hydra had composed it."""

from __future__ import annotations

import pickle

import pytest
from hydra import compose, initialize_config_dir, version
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.worker_config import compose_for_workers, run_composed


@pytest.fixture
def in_a_job():
    """A job of a sweep, as Hydra's state describes it."""
    words = ["hydra.mode=MULTIRUN", "optimizer.lr=0.5", "hydra.sweep.subdir=x"]
    directory = str(hydra_utils.config_directory())
    with initialize_config_dir(directory, **hydra_utils.VERSION_BASE):
        job = compose("config", words, return_hydra_config=True)
        HydraConfig.instance().set_config(job)
        yield
    HydraConfig.instance().cfg = None


def test_a_worker_has_a_single_run(in_a_job):
    overrides = [*hydra_utils.worker_overrides(), 'run.name="sweep/a=1,b=2"']
    composed = pickle.loads(pickle.dumps(compose_for_workers(overrides)))
    HydraConfig.instance().cfg = None
    seen = []

    def task(cfg):
        config = hydra_utils.to_config(cfg, HydraConfig.get(), HydraConfig.get().overrides.task)
        seen.append((config.run.name, config.optimizer.lr, "hydra" in cfg))
        assert hydra_utils.typed_keys() == {"optimizer.lr", "run.name"}
        assert not hydra_utils.is_multirun()
        assert set(hydra_utils.hydra_artifacts(cfg)) == {
            "config.yaml",
            "hydra.yaml",
            "overrides.yaml",
        }

    run_composed(task, composed)
    assert seen == [("sweep/a=1,b=2", 0.5, False)]


def test_flags_are_those_of_this_process(in_a_job):
    assert compose_for_workers(["--config-dir=/nowhere", "run.seed=7"]).run.seed == 7


def test_a_new_worker_has_the_version_base_of_its_parent(in_a_job, monkeypatch, recwarn):
    """Without one Hydra warns of what it does with the directory of a job."""
    composed = compose_for_workers(hydra_utils.worker_overrides())
    monkeypatch.setattr(version.VersionBase.instance(), "version_base", version._UNSPECIFIED_)
    seen = []
    run_composed(seen.append, composed)
    assert len(seen) == 1
    assert not recwarn.list


def test_a_worker_builds_what_a_configuration_names(in_a_job, recwarn):
    """As under Hydra's own entry point."""
    composed = compose_for_workers(hydra_utils.worker_overrides())
    seen = []
    run_composed(lambda cfg: seen.append(instantiate({"_target_": "fractions.Fraction"})), composed)
    assert seen == [0]
    assert not recwarn.list
