"""The run directory: its lock, its name, and the record of each start."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
import yaml
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.errors import ConfigError, RunError
from mingpt_ddp.storage.lock import LOCK, lock_now, open_lock
from mingpt_ddp.storage.run_directory import (
    RunDirectory,
    difference,
    next_free_name,
    read_result,
    recorded_config,
    refuse_other_loop,
    script_files,
)
from mingpt_ddp.storage.urls import open_storage

CONFIG = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "run": {"name": None}}


@pytest.fixture
def directory(tmp_path):
    """Lock the run directory `tmp_path / "run"` and return it."""
    owner = RunDirectory(tmp_path / "run", wait_s=0)
    yield owner
    owner.release()


@pytest.fixture
def other_owner(tmp_path):
    """Start another process that locks `tmp_path / "run"` until it is killed. Return its id."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            owner = RunDirectory(tmp_path / "run")
            os.write(writing, b"held")
            time.sleep(1000)
            owner.release()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 4) == b"held"
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)


def test_a_directory_has_one_owner_whom_the_error_names(other_owner, tmp_path):
    """A process that waits gets the directory when the owner is killed."""
    run = tmp_path / "run"
    before = (run / LOCK).read_text()
    for wait_s in (0, 0.2):
        with pytest.raises(RunError) as refused:
            RunDirectory(run, wait_s)
        message = str(refused.value)
        assert message.startswith(f"run error: {run} is locked by process {other_owner} on ")
        assert "still running" in message and "\n" not in message
    assert (run / LOCK).read_text() == before
    RunDirectory(tmp_path / "run-2", wait_s=0).release()

    # The owner is then a zombie, since nobody has reaped it. A zombie holds no lock.
    timer = threading.Timer(0.3, os.kill, [other_owner, signal.SIGKILL])
    timer.start()
    directory = RunDirectory(run, wait_s=60)
    assert (run / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    directory.release()
    timer.join()
    RunDirectory(run, wait_s=0).release()


@pytest.mark.parametrize("below", [".", "snapshots"])
def test_snapshots_in_the_run_directory_need_no_other_lock(below, directory, tmp_path):
    """If snapshot.path equals run.root, the snapshots are in the run directory itself."""
    directory.lock_snapshots(open_storage(str(tmp_path / "run" / below)))
    assert list(tmp_path.rglob(".lock")) == [tmp_path / "run" / LOCK]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("main.rank3.log", "precious"),
        ("metrics.jsonl", "nowhere"),
        ("tensorboard", "precious"),
        ("tensorboard/rank0", "nowhere"),
        (".hydra", "precious"),
    ],
)
def test_a_symbolic_link_where_a_run_writes_is_refused(name, target, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / ".config.partial").write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / target)
    with pytest.raises(RunError) as error:
        RunDirectory(tmp_path / "run", wait_s=0)
    message = f"run error: {link} is a symbolic link, which a run does not follow; remove it"
    assert str(error.value) == message
    assert not (tmp_path / "run" / LOCK).exists()
    assert os.listdir(tmp_path / "precious") == [".config.partial"]
    assert not (tmp_path / "nowhere").exists()
    link.unlink()
    RunDirectory(tmp_path / "run", wait_s=0).release()


def test_the_target_of_a_symbolic_link_is_not_touched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="cannot write to the run directory"):
        RunDirectory(tmp_path / "run", wait_s=0)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_full_disk_does_not_prevent_the_lock(tmp_path, limited_files):
    with limited_files(0):
        owner = RunDirectory(tmp_path / "run", wait_s=0)
    assert (tmp_path / "run" / LOCK).read_bytes() == b""
    owner.release()


def test_a_lock_that_is_a_pipe_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / LOCK)
    with pytest.raises(RunError, match=r"/\.lock is not a regular file; choose another"):
        RunDirectory(tmp_path / "run", wait_s=0)


@pytest.mark.parametrize(
    "name", ["file/run", "file", "dangling/run", "loop", "a" * 256, "a/" * 2500, "b/" + "ä" * 128]
)
def test_a_directory_that_cannot_be_locked_leaves_nothing_behind(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    message = r"cannot write to the run directory .*; choose another run\.root"
    with pytest.raises(RunError, match=message):
        RunDirectory(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_a_start_that_is_refused_leaves_no_new_directory(tmp_path):
    """The directory stays if a run has begun, or if it existed before."""
    (tmp_path / "old").mkdir()
    for name in ("old/new/run", "other/run", "old"):
        RunDirectory(tmp_path / name).release()
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    owner = RunDirectory(tmp_path / "old/run")
    owner.record_start(CONFIG, {})
    owner.release()
    assert (tmp_path / "old/run/config.yaml").exists()


def test_the_next_free_name(tmp_path):
    config = from_mapping(configure("run.name=group/run", f"run.root={tmp_path}"))
    for expected in ("group/run", "group/run-2", "group/run-3"):
        assert next_free_name(Job(config)) == expected
        (tmp_path / expected).mkdir(parents=True)
    (tmp_path / "group" / "run-2").rmdir()
    assert next_free_name(Job(config)) == "group/run-2"


# The record of starts


def changed(**optimizer: object) -> dict:
    return {**CONFIG, "optimizer": {**CONFIG["optimizer"], **optimizer}}


def configs(directory: RunDirectory) -> dict[str, float]:
    """Return the learning rate of each recorded configuration, by file name."""
    paths: list[Path] = sorted(directory.path.glob("config*.yaml"))
    return {path.name: yaml.safe_load(path.read_text())["optimizer"]["lr"] for path in paths}


def test_partial_files_of_a_killed_owner_are_deleted(directory):
    directory.record_start(CONFIG, {"config.yaml": "a: 1\n"})
    there = sorted(path.relative_to(directory.path) for path in directory.path.rglob("*"))
    for name in (
        ".config.yaml.0a1b2c3d.partial",
        ".result.json.0a1b2c3d.partial",
        ".hydra/.hydra.yaml.01234567.partial",
        ".tokenizer.json.0a1b2c3d.partial",
    ):
        (directory.path / name).write_text("half")
    directory.release()
    RunDirectory(directory.path, wait_s=0).release()
    assert sorted(path.relative_to(directory.path) for path in directory.path.rglob("*")) == there


@pytest.mark.parametrize("place", ["run/snapshots", "elsewhere/run"])
def test_probes_of_a_killed_owner_are_deleted(place, tmp_path):
    (snapshots := tmp_path / place).mkdir(parents=True)
    probe = f"probe-{uuid.uuid4().hex}"
    for name in (probe, f".{probe}.0a1b2c3d.partial", "probe-of-mine"):
        (snapshots / name).touch()
    (snapshots / probe.replace("-", "-a")[:-1]).mkdir()  # not a file
    owner = RunDirectory(tmp_path / "run", wait_s=0)
    owner.lock_snapshots(open_storage(str(snapshots)))
    owner.release()
    left = {path.name for path in snapshots.iterdir() if path.is_file()}
    assert left - {LOCK} == {"probe-of-mine"}


def test_each_start_that_differs_from_the_one_before_is_recorded(directory):
    """Files are sorted by number: config.10.yaml is later than config.9.yaml."""
    rates = [1e-3, 2e-3, 2e-3, 1e-3, *map(float, range(4, 11))]
    for lr in rates:
        directory.record_start(changed(lr=lr), {})
    assert configs(directory) == {
        "config.yaml": 1e-3,
        "config.2.yaml": 2e-3,
        "config.3.yaml": 1e-3,
        **{f"config.{number}.yaml": float(number) for number in range(4, 11)},
    }
    directory.record_start(changed(lr=10.0), {})
    assert len(configs(directory)) == 10


def test_a_run_name_and_null_are_not_a_difference(directory):
    """For an unnamed run, local workers record its name. A single process records null."""
    for name in (None, "texts-tiny-00000000", None):
        directory.record_start({**CONFIG, "run": {"name": name}}, {})
    assert list(configs(directory)) == ["config.yaml"]


def test_difference_names_keys_old_and_new():
    old = {"a": {"x": 1, "y": [1, 2], "gone": 5}, "b": {"z": None}}
    new = {"a": {"x": 1, "y": [1, 3], "new": 6}, "b": {"z": "text"}}
    assert difference(old, new) == [
        "a.y: [1, 2] -> [1, 3]",
        "a.gone: 5 -> null",
        "b.z: null -> text",
        "a.new: null -> 6",
    ]
    assert difference(old, old) == []


@pytest.mark.parametrize("name", ["result.json", "config.yaml"])
def test_a_pipe_is_not_read_as_a_record(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert read_result(tmp_path) == {}
    assert recorded_config(tmp_path) is None


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
def test_a_directory_that_is_lost_during_the_run(how, tmp_path):
    """Its owner writes nothing more, because another process may have locked a new directory."""
    owner = RunDirectory(tmp_path / "run")
    owner.check()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if how == "deleted":
        shutil.rmtree(tmp_path / "elsewhere")
    if how == "replaced":
        RunDirectory(tmp_path / "run").release()
    for write in (owner.check, lambda: owner.write_result({"status": "complete"})):
        with pytest.raises(RunError, match="/run was deleted or moved during the run, which ends"):
            write()
    assert not (tmp_path / "run" / "result.json").exists()
    owner.release()


def test_a_lost_directory_of_snapshots(directory, tmp_path):
    directory.lock_snapshots(open_storage(str(tmp_path / "snapshots")))
    directory.check()
    shutil.rmtree(tmp_path / "snapshots")
    with pytest.raises(RunError, match="/snapshots was deleted"):
        directory.check()


def test_a_lock_file_that_was_deleted_before_it_was_locked_is_locked_again(tmp_path):
    opened = []

    def lock(file) -> None:
        if not opened:
            (tmp_path / LOCK).unlink()
        opened.append(file)
        lock_now(file)

    file = open_lock(tmp_path, lock)
    assert len(opened) == 2 and file is opened[1]
    assert os.path.samestat(os.fstat(file.fileno()), os.stat(tmp_path / LOCK))
    file.close()


LOOPS = [None, Path("train.py"), Path("other.py"), Path("main.py")]


@pytest.mark.parametrize("now", LOOPS)
@pytest.mark.parametrize("before", LOOPS)
def test_a_different_training_loop_is_refused(before, now, directory):
    """The file name of a script identifies its loop. A user's script may be called main.py."""
    files = script_files(before, ["optimizer.lr=1"]) if before else {}
    directory.record_start(CONFIG, {}, private=files)
    if before == now:
        refuse_other_loop(directory.path, now)
        return
    with pytest.raises(ConfigError) as refused:
        refuse_other_loop(directory.path, now)
    names = [each.name if each else "mingpt_ddp's main.py" for each in (before, now)]
    assert f"by the loop of {names[0]}, not by the loop of {names[1]}; " in str(refused.value)
    assert str(refused.value).endswith("choose another run.name")


@pytest.mark.parametrize("now", LOOPS)
def test_a_directory_without_a_run_accepts_any_training_loop(now, tmp_path):
    refuse_other_loop(tmp_path, now)
