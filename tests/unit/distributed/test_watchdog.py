"""The watchdog finds the rank that hangs from the heartbeats of all ranks.

tests/e2e/test_stalls.py tests how the run then ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from launching import PATIENCE_S

from mingpt_ddp.distributed.watchdog import NO_HEARTBEAT, HangDetector
from mingpt_ddp.process.linux import STOPPED, read_state

LIMIT_S = 8.0
# A heartbeat is (count of the training thread, count of the watchdog, does the rank wait?, activity
# if it is not training), or None if the rank has not written one. A case has a list of times in
# seconds, each with the heartbeats of all ranks. Last come the final time with its heartbeats, and
# the message at that time.
STALLED = "rank 1 has stalled for 8 s while training"
SILENT = "; its process does not respond"
NETWORK = "all ranks have waited for each other for 9 s while training: check the network"
TIMELINES = {
    "a straggler": (
        [(0, (1, 1, True), (1, 1, False)), (8, (1, 9, True), (1, 9, False))],
        (8.5, (1, 10, True), (1, 10, False)),
        STALLED,
    ),
    "stopped before its first heartbeat": (
        [(0, (1, 1, True), None)],
        (8.5, (1, 10, True), None),
        f"rank 1 has stalled for 8 s while starting{SILENT}",
    ),
    "stopped, while another one is late": (
        [(0, (1, 1, False), (1, 1, True))],
        (8.5, (1, 10, False), (1, 1, True)),
        STALLED + SILENT,
    ),
    "stopped while it trained": (
        [(0, (1, 1, True), (1, 1, False)), (0.5, (1, 2, True), (1, 2, False))],
        (8.25, (3, 10, True), (1, 2, False)),
        STALLED + SILENT,
    ),
    "stopped while it waited": (  # at 8.25 s its last heartbeat was 7.75 s ago
        [
            (0, (1, 1, True), (1, 1, True)),
            (0.5, (1, 2, True), (1, 2, True)),
            (8.25, (2, 9, True), (1, 2, True)),
        ],
        (8.75, (3, 10, True), (1, 2, True)),
        f"rank 1 has stalled for 9 s while training{SILENT}",
    ),
    "others have waited for it for longer": (
        [
            (0, (1, 1, True), (1, 1, False), (1, 1, True)),
            (1, (1, 2, True), (2, 2, False), (1, 2, True)),
            (8.5, (1, 9, True), (2, 9, False), (1, 9, True)),
        ],
        (9.5, (1, 10, True), (2, 10, False), (1, 10, True)),
        STALLED,
    ),
    "it imports, on a busy machine": (
        [
            (0, (1, 1, True), (1, 1, False, "starting")),
            (120, (1, 61, True), (1, 61, False, "starting")),
        ],
        (120.5, (2, 62, True), (1, 62, False, "starting")),
        "rank 1 has stalled for 120 s while starting",
    ),
    "it may read for hours, but not stop": (
        [
            (0, (1, 1, True), (1, 1, False, "reading the data")),
            (10_000, (1, 2, True), (1, 2, False, "reading the data")),
        ],
        (10_008.5, (2, 3, True), (1, 2, False, "reading the data")),
        f"rank 1 has stalled for 10008 s while reading the data{SILENT}",
    ),
    "all wait": (
        [(0, (1, 1, True), (1, 1, True))],
        (9, (1, 9, True), (1, 9, True)),
        NETWORK,
    ),
}


def heartbeats(ranks: list[tuple | None]) -> dict[int, dict[str, Any]]:
    found = {}
    for rank, values in enumerate(ranks):
        count, beat, waiting, *activity = values or (0, 0, False)
        found[rank] = {
            "count": count,
            "beat": beat,
            "waiting": waiting,
            "activity": activity[0] if activity else "training",
        }
        if values is None:
            found[rank] = NO_HEARTBEAT
    return found


@pytest.mark.parametrize("name", TIMELINES)
def test_the_rank_that_hangs_is_named(name):
    before, (second, *ranks), message = TIMELINES[name]
    detector = HangDetector(LIMIT_S, len(ranks))
    for earlier, *earlier_ranks in before:
        assert detector.find(heartbeats(earlier_ranks), earlier) is None
    assert detector.find(heartbeats(ranks), second) == message


def test_a_rank_that_sees_only_the_heartbeat_of_rank_zero():
    """If rank zero waits, this does not mean that all ranks wait."""
    detector = HangDetector(LIMIT_S, world_size=2)
    for second, count, waiting in ((0, 1, True), (9, 1, True), (9.5, 2, False)):
        assert detector.find(heartbeats([(count, second, waiting)]), second) is None
    message = "rank 0 has stalled for 8 s while training"
    assert detector.find(heartbeats([(2, 18, False)]), 18) == message


KILLER = """
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.parent_watch import kill_stopped_siblings
kill_stopped_siblings(DistEnv(has_agent={has_agent}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_only_a_stopped_process_of_the_same_agent_is_killed():
    """A shell may have stopped its own processes with Ctrl-Z. They are left alone."""

    def call(has_agent: bool) -> None:
        killer = KILLER.format(has_agent=has_agent)
        subprocess.run([sys.executable, "-c", killer], check=True)

    stranger = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, "
        "flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", stranger], stdout=subprocess.PIPE, text=True
    ) as sibling:
        child = int(sibling.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        call(has_agent=True)
        assert sibling.poll() is None
        assert read_state(child) == STOPPED
        os.kill(sibling.pid, signal.SIGSTOP)
        call(has_agent=False)
        assert read_state(sibling.pid) == STOPPED
        call(has_agent=True)
        assert sibling.wait(PATIENCE_S) == -signal.SIGKILL
        os.kill(child, signal.SIGKILL)
