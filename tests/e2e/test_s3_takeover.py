"""A run that is suspended while another start takes over its object store, and wakes up again."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import pytest
from launching import TINY, Job, python_main, wait_for
from pause_points import PausedJob

from mingpt_ddp.snapshots.store import SnapshotStore

SAVES = [
    *TINY,
    "snapshot.every_steps=4",
    "snapshot.background=false",
    "run.name=run",
    "trainer.max_steps=10000000",
    "trainer.eval_every=null",
]

# A process stops itself, with its thread of heartbeats.
STOP = """
import signal
def stop(name):
    if not (HERE / mine(name)).exists():
        (HERE / mine(name)).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
"""
SHORT_LEASE = """
def shorten(lease):
    lease.HEARTBEAT_INTERVAL_S, lease.LEASE_TTL_S, lease.TAKEOVER_GRACE_S = 0.5, 3.0, 0.5
PATCHES["mingpt_ddp.storage.lease"] = shorten
"""
BETWEEN_TWO_STEPS = """
def stop_before_a_step(trainer):
    train = trainer.Trainer._train
    def train_or_stop(self, step):
        if step == 8:
            stop("point")
        return train(self, step)
    trainer.Trainer._train = train_or_stop
PATCHES["mingpt_ddp.training.trainer"] = stop_before_a_step
"""
IN_BEGIN = """
def stop_after_the_lease_is_read(store):
    check_lease, begin = store.SnapshotStore.check_lease, store.SnapshotStore.begin
    beginning = []
    def begin_step(self, step):
        beginning[:] = [step]
        begin(self, step)
        beginning.clear()
    def check_or_stop(self):
        check_lease(self)
        if beginning == [8]:
            stop("point")
    store.SnapshotStore.check_lease, store.SnapshotStore.begin = check_or_stop, begin_step
PATCHES["mingpt_ddp.snapshots.store"] = stop_after_the_lease_is_read
"""
BEFORE_RETENTION = """
def stop_before_retention(retention):
    prune = retention.prune
    def prune_or_stop(store, keep_last, best, newest, every=None):
        if newest == 8:
            stop("point")
        prune(store, keep_last, best, newest, every)
    retention.prune = prune_or_stop
PATCHES["mingpt_ddp.snapshots.write.retention"] = stop_before_retention
"""


class StoppedJob(PausedJob):
    settings = SAVES


@pytest.fixture(scope="module")
def bucket(seaweed):
    return seaweed.make_bucket("takeover")


@pytest.fixture
def aws(seaweed, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "SHARED_CREDENTIALS"):
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "point",
    [BETWEEN_TWO_STEPS, IN_BEGIN, BEFORE_RETENTION],
    ids=["between two steps", "in begin", "before retention"],
)
def test_a_run_that_wakes_up_deletes_nothing_of_its_successor(
    point: str, aws, bucket: str, tmp_path: Path
):
    """It has committed step 4, and perhaps step 8; its successor keeps both."""
    path = f"s3://{bucket}/{uuid.uuid4().hex}"
    command = [*python_main()]
    first = StoppedJob(
        command,
        tmp_path,
        STOP + SHORT_LEASE + point,
        f"snapshot.path={path}",
        "snapshot.keep_last=1",
        "snapshot.keep_best=false",
        "run.root=first",
    )
    second: StoppedJob | None = None
    store = SnapshotStore(f"{path}/run")
    try:
        first.wait_until("point")
        second = StoppedJob(
            command,
            tmp_path,
            SHORT_LEASE,
            f"snapshot.path={path}",
            "snapshot.keep_last=100000",
            "run.root=second",
        )
        wait_for(lambda: store.is_committed(12), what="snapshots of the second run")
        os.kill(first.process_at("point"), signal.SIGCONT)
        assert first.wait() == 2, first.job.text()
        errors = [line for line in first.job.text().splitlines() if "error: " in line]
        # The heartbeat and the next save both notice it, each in its own words.
        expected = rf"run error: {path}/run was taken over by (another )?process"
        assert re.match(expected, errors[-1]), errors
        second.job.kill_tree()
        whole = [step for step in store.steps() if store.is_committed(step)]
        assert whole[:3] == [4, 8, 12]
        assert [store.read(step).step for step in whole[:3]] == whole[:3]
    finally:
        jobs: list[Job] = [each.job for each in (first, second) if each is not None]
        for job in jobs:
            if job.process.poll() is None:
                job.kill_tree()
