"""Check runs on full or read-only disks, two runs in one directory, and wrong file times."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from launching import TINY, Job, call, committed, python_main, wait_for
from runs import verified_steps

SNAPSHOT_KIB = 205  # approximate size of a snapshot of these runs
DISK_KIB = 3 * SNAPSHOT_KIB  # a disk has space for two snapshots and the directories


@pytest.fixture
def disk(tmp_path):
    """Return a function that mounts or remounts a tmpfs below tmp_path.

    It takes a name, the size in KiB and mount options.
    """
    mounted: list[Path] = []

    def mount(name: str, size: int, *options: str) -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        options = (f"size={size}k", *options)
        args = ["mount", "-o", ",".join(options), "-t", "tmpfs", "tmpfs", str(path)]
        if shutil.which("mount") is None:
            pytest.skip("there is no mount command")
        done = subprocess.run(args, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
        if "remount" not in options:
            mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def train(cwd: Path, *args: str):
    return call([*python_main(), *TINY, "run.name=a", "trainer.sample_every=null", *args], cwd)


KEEP_ALL = ["snapshot.every_steps=1", "snapshot.keep_last=99", "snapshot.background=false"]


@pytest.mark.parametrize("max_failures", [0, 2])
def test_a_full_disk_ends_the_run_after_too_many_failures(max_failures, tmp_path, disk):
    full = disk("full", DISK_KIB)
    done = train(
        tmp_path, f"snapshot.path={full}", f"snapshot.max_failures={max_failures}", *KEEP_ALL
    )
    assert done.returncode == 2, done.stdout
    steps = verified_steps(full / "a", tmp_path)
    assert steps and steps == list(range(1, len(steps) + 1))
    warnings = re.findall(
        r"cannot write the snapshot of step \d+: .*; training continues \(failure (\d) of",
        done.stdout,
    )
    assert warnings == [str(i + 1) for i in range(max_failures)]
    errors = [line for line in done.stdout.splitlines() if re.match("[a-z]+ error: ", line)]
    assert len(errors) == 1, done.stdout
    assert done.stdout.splitlines()[-1] == errors[0]
    assert "No space left on device" in errors[0] and "older snapshots are intact" in errors[0]
    assert "Traceback" not in done.stdout

    subprocess.run(["mount", "-o", "remount,size=16m", str(full)], check=True)
    resumed = train(tmp_path, f"snapshot.path={full}", *KEEP_ALL)
    assert resumed.returncode == 0, resumed.stdout
    assert f"resuming from the snapshot of step {steps[-1]} of 12" in resumed.stdout
    assert verified_steps(full / "a", tmp_path) == list(range(1, 13))


def test_a_full_disk_does_not_cause_a_restart(tmp_path, disk):
    full = disk("full", DISK_KIB)
    paths = [f"snapshot.path={full}", "snapshot.max_failures=0", *KEEP_ALL]
    done = train(tmp_path, *paths, "ddp.nproc_per_node=2", "trainer.micro_batch_size=6")
    assert done.returncode == 2, done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "storage error: cannot write the snapshot of step "
    )
    assert "restart 1" not in done.stdout
    rows = (tmp_path / "outputs" / "a" / "metrics.jsonl").read_text()
    assert rows.count('"start"') == 1


def test_a_read_only_disk_is_refused_at_the_start(tmp_path, disk):
    directory = disk("readonly", DISK_KIB)
    disk("readonly", DISK_KIB, "remount", "ro")
    for args in ([f"snapshot.path={directory}"], [f"run.root={directory}"]):
        done = train(tmp_path, *args)
        assert done.returncode == 2, done.stdout
        error = done.stdout.splitlines()[-1]
        assert error.startswith("run error: cannot write to") and "Read-only file system" in error
    assert os.listdir(directory) == []


def test_a_disk_that_is_full_for_a_while(tmp_path, disk):
    directory = disk("filling", 4 * SNAPSHOT_KIB)
    args = [
        f"snapshot.path={directory}",
        "snapshot.max_failures=1000000",
        "trainer.max_steps=1000000",
        "trainer.eval_every=null",
    ]
    job = Job([*python_main(), *TINY, "run.name=a", *args], tmp_path)
    try:
        wait_for(lambda: list(directory.glob("a/step_*/manifest.json")), what="a snapshot")

        def is_full() -> bool:
            # Fill the disk each time, since the run may have deleted a snapshot.
            fill(directory / "other")
            return "training continues" in job.text()

        wait_for(is_full, what="a snapshot that fails")
        (directory / "other").unlink()
        failed = max(steps_in(directory), default=0)
        wait_for(lambda: max(steps_in(directory), default=0) > failed, what="a later snapshot")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0, job.text()
    finally:
        if job.process.poll() is None:
            job.kill_tree()
    assert "No space left on device" in job.text() and "preempted at step" in job.text()
    assert verified_steps(directory / "a", tmp_path)[-1] > failed


def fill(path: Path) -> None:
    """Extend a file until the disk is full."""
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def steps_in(directory: Path) -> list[int]:
    return [int(path.parent.name[5:]) for path in directory.glob("a/step_*/manifest.json")]


@pytest.mark.parametrize(
    ("words", "other", "locked"),
    [([], [], "outputs/a"), (["snapshot.path=shared"], ["run.root=second"], "shared/a")],
    ids=["the run directory", "the snapshots"],
)
def test_a_second_run_of_the_same_name_is_refused(words, other, locked, tmp_path):
    command = [*python_main(), *TINY, *words, "run.name=a", "trainer.max_steps=100000"]
    first = Job(command, tmp_path)
    saved = tmp_path / ("shared/a" if words else "outputs/a/snapshots")
    wait_for(lambda: [*saved.glob("*/manifest.json")], what="a snapshot")
    second = train(tmp_path, "ddp.timeout_s=2", *words, *other)
    assert second.returncode == 2, second.stdout
    error = second.stdout.splitlines()[-1]
    assert error.startswith("run error: ") and f"{locked} is locked by process " in error
    assert f"process {first.process.pid} on " in error and "still running" in error
    assert first.process.poll() is None
    first.kill_tree()
    # A killed process does not hold its lock any more.
    assert train(tmp_path, *words, "trainer.max_steps=4").returncode == 0


def test_modification_times_are_ignored(tmp_path):
    """Older files may look newer after a restore from a backup, or if the clock was set back."""
    assert train(tmp_path, "snapshot.keep_last=9", "trainer.max_steps=8").returncode == 0
    run = tmp_path / "outputs" / "a"
    steps = committed(run)
    assert steps == [4, 6, 8]
    for step in steps:
        directory = run / "snapshots" / f"step_{step:08d}"
        for path in (*directory.iterdir(), directory):
            os.utime(path, (2e9 - step * 1e8, 2e9 - step * 1e8))
    done = train(tmp_path, "snapshot.keep_last=2")
    assert "resuming from the snapshot of step 8 of 12" in done.stdout
    assert committed(run) == [8, 12]


def test_a_run_directory_that_is_deleted_meanwhile(tmp_path):
    """The lock file is deleted too, so a second run could start in the same directory.

    So the first run must neither continue nor end successfully.
    """
    endless = [*TINY, "run.name=a", "trainer.max_steps=100000", "trainer.eval_every=null"]
    job = Job([*python_main(), *endless], tmp_path)
    run = tmp_path / "outputs" / "a"
    wait_for(lambda: committed(run), what="a snapshot")
    run.rename(tmp_path / "moved")
    second = train(tmp_path, "trainer.max_steps=8", "trainer.eval_every=null")
    assert second.returncode == 0, second.stdout
    assert job.wait() == 2, job.text()
    last = job.text().splitlines()[-1]
    assert last.startswith("run error: outputs/a was deleted or moved during the run")
    assert committed(run) == [4, 8]
