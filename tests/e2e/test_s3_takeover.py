"""Check a run that is suspended, loses its object store to another start, and wakes up again.

unit/snapshots/test_lost_lease.py checks such a process at each point of a save.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import pytest
from holding import HeldRun
from launching import TINY, Job, python_main, wait_for
from runs import verified_steps
from store_limits import with_limits

LEASE = {"HEARTBEAT_INTERVAL_S": 0.5, "LEASE_TTL_S": 3.0, "TAKEOVER_GRACE_S": 0.5}
SAVES = [
    *TINY,
    "snapshot.every_steps=4",
    "snapshot.background=false",
    "trainer.max_steps=10000000",
    "trainer.eval_every=null",
    "run.name=run",
]
# The process stops itself, including its heartbeat thread.
STOP = """
def reach(step, rank):
    if step == 8:
        (HERE / "stopped.0").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def aws(seaweed, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "SHARED_CREDENTIALS"):
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    return seaweed.make_bucket("takeover")


def test_a_run_that_wakes_up_deletes_nothing_of_its_successor(aws, tmp_path: Path):
    """The run has committed step 4. Its successor keeps this snapshot and continues from it."""
    path = f"s3://{aws}/{uuid.uuid4().hex}"
    common = [*python_main(), *SAVES, f"snapshot.path={path}"]
    limits = {"PYTHONPATH": with_limits(tmp_path / "site", {}, LEASE)}
    keeps_one = ["snapshot.keep_last=1", "snapshot.keep_best=false", "run.root=first"]
    first = HeldRun([*common, *keeps_one], tmp_path, STOP, **limits)
    first.wait_until("stopped")
    second = Job([*common, "snapshot.keep_last=100000", "run.root=second"], tmp_path, **limits)
    log = tmp_path / "second" / "run" / "main.rank0.log"

    def has_saved(step: int) -> bool:
        return log.exists() and f"snapshot of step {step} committed" in log.read_text()

    wait_for(lambda: has_saved(12), what="snapshots of the second run")
    os.kill(first.process_at("stopped"), signal.SIGCONT)
    assert first.wait() == 2, first.job.text()
    errors = [line for line in first.job.text().splitlines() if "error: " in line]
    # The heartbeat and the next save both notice the takeover, and have different messages.
    expected = rf"run error: {path}/run was taken over by (another )?process"
    assert re.match(expected, errors[-1]), errors
    before = re.findall(r"snapshot of step (\d+) committed", log.read_text())
    wait_for(lambda: has_saved(int(before[-1]) + 4), what="the second run to continue")
    second.kill_tree()
    assert verified_steps(f"{path}/run", tmp_path)[:3] == [4, 8, 12]
