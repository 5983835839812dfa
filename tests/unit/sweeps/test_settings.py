"""Which jobs run at a time, and what a sweep keeps of that."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from mingpt_ddp.config.compose.hydra_utils import SWEEPER, VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.group import rendezvous
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.run_directory import FAILURES, SWEEP
from mingpt_ddp.storage.sweep_file import Failure, SweepFile, read_failures
from mingpt_ddp.sweeps import settings
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.live_table import LiveTable
from mingpt_ddp.sweeps.settings import check_settings, plan_slots
from mingpt_ddp.sweeps.sources import source_of
from mingpt_ddp.sweeps.sweep import Sweep

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
    (["sweep.pruner=median"], "needs jobs of this machine, not of SlurmLauncher"),
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


def test_failures_are_kept_until_the_job_succeeds(tmp_path):
    file = SweepFile(tmp_path)
    file.fail("lr=1", "lr=1-abcd", "first")
    file.fail("lr=1", "lr=1-abcd", "second")
    file.fail("lr=2", "", "third")
    path = tmp_path / FAILURES
    path.write_bytes(path.read_bytes() + b'{"job": "lr=1", "reas')  # of a killed process
    expected = [Failure("lr=1", "lr=1-abcd", 2, "second"), Failure("lr=2", "", 1, "third")]
    assert read_failures(tmp_path) == expected
    for name in ("lr=1-abcd", ""):
        assert SweepFile(tmp_path).failure_of("lr=1", name) == expected[0]
        assert file.failure_of("lr=1", name) == expected[0]
    file.succeed("lr=1", "lr=1-abcd")
    assert read_failures(tmp_path) == expected[1:] and file.failure_of("lr=1", "") is None
    file.succeed("lr=2", "lr=2-cdef")
    assert read_failures(tmp_path) == []


def test_a_failure_is_that_of_a_directory_however_its_job_is_spelled(tmp_path):
    """Lines that name the job alone, and sweep.json, are those of earlier versions."""
    earlier = {"lr=3": {"directory": "lr=3-1234", "count": 2, "reason": "why"}, "lr=4": 5}
    (tmp_path / SWEEP).write_text(json.dumps({"failures": earlier}))
    file = SweepFile(tmp_path)
    file.fail("lr=1e-3", "lr=1e-3-abcd", "why")
    file.fail("lr=1e-3", "lr=1e-3-ef01", "of another size")
    file.fail("lr=0.001, seed=1", "lr=0.001,seed=1-abcd", "why")
    assert file.failure_of("lr=1.0e-3", "lr=1.0e-3-abcd").count == 2
    assert file.failure_of("lr=1e-3", "lr=1e-3-2345") is None
    assert [failure.count for failure in read_failures(tmp_path)] == [2, 1, 2]
    file.succeed("lr=1e-3", "lr=1e-3-abcd")
    assert [failure.reason for failure in read_failures(tmp_path)] == ["why", "of another size"]
    with (tmp_path / FAILURES).open("a") as lines:
        for label in ("lr=3", "lr=1e-3"):
            lines.write(json.dumps({"job": label, "directory": None, "reason": None}) + "\n")
    assert read_failures(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]",
        '{"cores": "2", "threads": [1], "failures": [2]}',
        '{"job": 1}\n{"reason": 2}\n[3]\n\xff',
    ],
)
def test_a_damaged_file_counts_as_none(content, tmp_path):
    for name in (SWEEP, FAILURES):
        (tmp_path / name).write_text(content)
    file = SweepFile(tmp_path)
    assert (file.cores, read_failures(tmp_path)) == (None, [])
    assert file.threads(1, 2) == 2


def test_an_unnamed_sweep_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = SweepFile(None)
    file.keep_cores(2)
    file.fail("lr=1", "", "why")
    assert file.cores == 2 and file.failure_of("lr=1", "lr=1-abcd")
    assert not [*tmp_path.iterdir()]


def test_rank_zero_sends_the_overrides_of_a_job(monkeypatch, configure, tmp_path):
    from torch.distributed import HashStore, PrefixStore

    store = HashStore()
    connect = lambda env, job, timeout_s: PrefixStore(f"{job}", store)  # noqa: E731
    monkeypatch.setattr(rendezvous, "open_store", connect)
    searched = SweepConfig(sampler="random", trials=2)
    swept = OverridesParser.create().parse_overrides(["optimizer.lr=choice(1,2)", "run.seed=3"])
    zero, other = (
        source_of(searched, swept, configure(), tmp_path, DistEnv(rank=rank, world_size=2))
        for rank in (0, 1)
    )
    assert other.trials is None and zero.trials is not None
    zero.trials.begin()
    for number in (0, 1):
        overrides = zero.overrides(number)
        assert overrides == zero.trials.overrides(number) == other.overrides(number)
        assert zero.job(number) == other.job(number) == Job(number, overrides[1])
        assert overrides[0] == "run.seed=3"


def test_the_jobs_of_a_grid_are_in_the_order_of_the_command(configure, tmp_path):
    words = ["optimizer.lr=1,2", "run.seed=3"]
    swept = OverridesParser.create().parse_overrides(words)
    grid = source_of(SweepConfig(), swept, configure(), tmp_path, ALONE)
    assert [grid.overrides(number) for number in range(2)] == [
        ["optimizer.lr=1", "run.seed=3"],
        ["optimizer.lr=2", "run.seed=3"],
    ]
    assert [grid.job(number).label for number in (0, 1)] == ["optimizer.lr=1", "optimizer.lr=2"]
    alone = source_of(SweepConfig(), swept[1:], configure(), tmp_path, ALONE)
    assert alone.job(0) == Job(0, "the only job")


def test_the_live_table_shows_the_last_values(tmp_path):
    lines = [{"step": 10, "train_loss": 3.0}, {"step": 20, "val_loss": 2.5, "note": "a"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3')  # being written
    job = SimpleNamespace(number=1, label="optimizer.lr=1")
    local = SimpleNamespace(job=job, launch=SimpleNamespace(directory=tmp_path), started_at=0.0)
    running = {Slot(0, ()): local}
    table = LiveTable(Sweep(planned=3), running)
    drawn = table.draw()
    assert drawn.title == "0 of 3 jobs ended"
    cells = [str(next(iter(column.cells))) for column in drawn.columns]
    assert cells[:5] == ["2", "optimizer.lr=1", "20", "3.0000", "2.5000"]
    running.clear()
    assert table.draw().row_count == 0
