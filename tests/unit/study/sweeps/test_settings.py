"""The slots for concurrent jobs, and the cores and threads that a sweep records."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mingpt_ddp.config.compose.hydra_utils import SWEEPER, VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.study.sweeps import settings
from mingpt_ddp.study.sweeps.settings import check_settings, plan_slots

LOCAL = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
ALONE = DistEnv()


@pytest.fixture(scope="module")
def base() -> Config:
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", ["run.name=sweep"])))


@pytest.fixture
def configure(base):
    """Return a function that makes the configuration of a job from its sweep settings."""

    def configure(ranks: int | str | None = None, device: str = "auto", **settings) -> Config:
        ddp = base.ddp if ranks is None else replace(base.ddp, nproc_per_node=ranks)
        trainer = replace(base.trainer, device=device)
        return replace(base, ddp=ddp, trainer=trainer, sweep=replace(base.sweep, **settings))

    return configure


def check(config: Config, launcher: str = LOCAL, env: DistEnv = ALONE):
    targets = {"launcher": {"_target_": launcher}, "sweeper": {"_target_": SWEEPER}}
    return check_settings(OmegaConf.create({"hydra": targets}), [config], env)


@pytest.mark.parametrize(
    ("settings", "on_slurm", "in_lock_step"),
    [
        (
            {"sampler": "tpe", "pruner": "median"},
            "sweep.pruner=median is for jobs on this machine, not for SlurmLauncher",
            None,
        ),
        ({"sampler": "tpe", "parallel": 4}, None, "does not work under torchrun; run "),
        ({"parallel": "auto"}, "is for jobs on this machine", "does not work under torchrun; run "),
        ({"parallel": 2}, "which gets all jobs of a grid", "does not work under torchrun; run "),
        (
            {"retries": 1},
            "are for jobs on this machine",
            "under torchrun, whose ranks fail together",
        ),
        ({"max_failures": 1}, "are for jobs on this machine", None),
    ],
    ids=str,
)
def test_settings_that_external_launchers_and_torchrun_refuse(
    settings, on_slurm, in_lock_step, configure
):
    config = configure(**settings)
    assert check(config) == config.sweep, "on this machine"
    ranks = DistEnv(world_size=2, is_standalone=False)
    for launcher, env, message in ((SLURM, ALONE, on_slurm), (LOCAL, ranks, in_lock_step)):
        if message is None:
            assert check(config, launcher, env) == config.sweep
        else:
            with pytest.raises(ConfigError, match=message):
                check(config, launcher, env)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the cores and GPUs of this machine."""

    def machine(cores: int, gpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.setattr(settings, "visible_gpus", lambda: [str(i) for i in range(gpus)])

    return machine


@pytest.mark.parametrize(
    ("parallel", "ranks", "cores", "gpus", "expected"),
    [
        (1, None, 8, 0, []),
        (2, None, 8, 0, [(4, None), (4, None)]),
        (3, None, 8, 0, [(2, None)] * 3),
        ("auto", None, 3, 0, [(1, None)] * 3),
        ("auto", 2, 5, 0, [(2, None)] * 2),
        ("auto", 4, 2, 0, [(2, None)]),
        ("auto", None, 16, 4, [(4, 1)] * 4),
        ("auto", 2, 16, 4, [(8, 2)] * 2),
        (2, None, 16, 4, [(8, 2)] * 2),
        (2, None, 16, 1, "sweep.parallel=2 needs 2 GPUs"),
        (2, 2, 4, 1, "needs 2 GPUs for a job"),
        (3, 2, 4, 4, "needs 6 GPUs.*choose at most 2"),
        (2, "gpu", 4, 4, "takes all GPUs for one job"),
        (1000, None, 4, 0, "sweep.parallel=1000 must be at most"),
    ],
)
def test_slots(parallel, ranks, cores, gpus, expected, configure, machine, tmp_path):
    machine(cores, gpus)
    config = configure(ranks, parallel=parallel)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            plan_slots(config.sweep, [config], tmp_path)
        return
    slots = plan_slots(config.sweep, [config], tmp_path)
    assert [(len(slot.cores), slot.gpus and len(slot.gpus)) for slot in slots] == expected
    taken = [core for slot in slots for core in slot.cores]
    if len(taken) <= cores:
        assert len(set(taken)) == len(taken), "two jobs share a core"


def test_jobs_on_the_cpu_need_no_gpu(configure, machine, tmp_path):
    machine(16, 1)
    config = configure(device="cpu", parallel=2)
    assert [slot.gpus for slot in plan_slots(config.sweep, [config], tmp_path)] == [None, None]


def test_a_sweep_keeps_the_cores_and_threads_of_its_jobs(configure, machine, tmp_path):
    machine(8, 0)
    SweepFile(tmp_path).keep_cores(4)
    config = configure(parallel=4)
    slots = plan_slots(config.sweep, [config], tmp_path)
    assert [slot.cores for slot in slots] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
    assert SweepFile(tmp_path).threads(2, 3) == 3
    assert SweepFile(tmp_path).threads(2, 8) == 3, "another default at a later start"
    assert SweepFile(tmp_path).threads(1, 8) == 8
