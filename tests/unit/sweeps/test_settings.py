"""Which jobs run at a time, and what a sweep keeps of that."""

from __future__ import annotations

import os

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mingpt_ddp.config.compose.hydra_utils import SWEEPER, VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.sweeps import settings
from mingpt_ddp.sweeps.settings import check_settings, plan_slots

LOCAL = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
ALONE = DistEnv()


@pytest.fixture
def configure(tmp_path):
    """Return a function that composes the configuration of a job."""

    def configure(*words: str) -> Config:
        with initialize_config_dir(str(config_directory()), **VERSION_BASE):
            words = (f"run.root={tmp_path}", "run.name=sweep", *words)
            return from_mapping(to_plain(compose("config", [*words])))

    return configure


def check(config: Config, launcher: str = LOCAL, env: DistEnv = ALONE):
    targets = {"launcher": {"_target_": launcher}, "sweeper": {"_target_": SWEEPER}}
    return check_settings(OmegaConf.create({"hydra": targets}), [config], env)


REFUSED_ELSEWHERE = [
    (
        ["sweep.sampler=tpe", "sweep.pruner=median"],
        "needs jobs of this machine, not of SlurmLauncher",
    ),
    (["sweep.parallel=auto"], "is for jobs of this machine"),
    (["sweep.parallel=2"], "gets all jobs of a grid at once"),
    (["sweep.retries=1"], "are for jobs of this machine"),
    (["sweep.max_failures=1"], "are for jobs of this machine"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED_ELSEWHERE)
def test_an_external_launcher(words, expected, configure):
    with pytest.raises(ConfigError, match=expected):
        check(configure(*words), SLURM)
    assert check(configure(*words)), "on this machine"


def test_a_search_runs_in_batches_of_an_external_launcher(configure):
    assert check(configure("sweep.sampler=tpe", "sweep.parallel=4"), SLURM).parallel == 4


@pytest.mark.parametrize("words", [["sweep.parallel=2"], ["sweep.parallel=auto"]])
def test_torchrun_has_no_parent_of_all_jobs(words, configure):
    env = DistEnv(world_size=2, is_standalone=False)
    with pytest.raises(ConfigError, match=r"needs a parent of all jobs: python -m mingpt_ddp -m"):
        check(configure(*words), env=env)
    with pytest.raises(ConfigError, match="all ranks fail alike"):
        check(configure("sweep.retries=1"), env=env)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the cores and GPUs of this machine."""

    def machine(cores: int, gpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr(settings, "visible_gpus", lambda: [str(i) for i in range(gpus)])

    return machine


@pytest.mark.parametrize(
    ("words", "cores", "gpus", "expected"),
    [
        (["sweep.parallel=1"], 8, 0, []),
        (["sweep.parallel=2"], 8, 0, [(4, None), (4, None)]),
        (["sweep.parallel=3"], 8, 0, [(2, None)] * 3),
        (["sweep.parallel=auto"], 3, 0, [(1, None)] * 3),
        (["sweep.parallel=auto", "ddp.nproc_per_node=2"], 5, 0, [(2, None)] * 2),
        (["sweep.parallel=auto", "ddp.nproc_per_node=4"], 2, 0, [(2, None)]),
        (["sweep.parallel=auto"], 16, 4, [(4, 1)] * 4),
        (["sweep.parallel=auto", "ddp.nproc_per_node=2"], 16, 4, [(8, 2)] * 2),
        (["sweep.parallel=2"], 16, 4, [(8, 2)] * 2),
        (["sweep.parallel=2", "trainer.device=cpu"], 16, 1, [(8, None)] * 2),
    ],
)
def test_slots(words, cores, gpus, expected, configure, machine, tmp_path):
    machine(cores, gpus)
    config = configure(*words)
    slots = plan_slots(config.sweep, [config], tmp_path)
    found = [(len(slot.cores), slot.gpus and len(slot.gpus)) for slot in slots]
    assert found == expected
    taken = [core for slot in slots for core in slot.cores]
    if len(taken) <= cores:
        assert len(set(taken)) == len(taken), "two jobs share a core"


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        (["sweep.parallel=2", "ddp.nproc_per_node=2"], 1, "needs 2 GPUs for a job"),
        (["sweep.parallel=3", "ddp.nproc_per_node=2"], 4, "needs 6 GPUs.*choose at most 2"),
        (["sweep.parallel=2", "ddp.nproc_per_node=gpu"], 4, "takes all GPUs for one job"),
        (["sweep.parallel=1000"], 0, "sweep.parallel=1000 must be at most"),
    ],
)
def test_too_few_gpus_or_cores(words, gpus, expected, configure, machine, tmp_path):
    machine(4, gpus)
    config = configure(*words)
    with pytest.raises(ConfigError, match=expected):
        plan_slots(config.sweep, [config], tmp_path)


def test_a_sweep_keeps_the_cores_and_threads_of_its_jobs(configure, machine, tmp_path):
    machine(8, 0)
    SweepFile(tmp_path).keep_cores(4)
    config = configure("sweep.parallel=4")
    assert [slot.cores for slot in plan_slots(config.sweep, [config], tmp_path)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ] * 2
    assert SweepFile(tmp_path).threads(2, 3) == 3
    assert SweepFile(tmp_path).threads(2, 8) == 3, "another default at a later start"
    assert SweepFile(tmp_path).threads(1, 8) == 8
