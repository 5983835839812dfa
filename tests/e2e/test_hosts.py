"""Check runs of three ranks on two hosts with the real torchrun, with faults in mid-run.

The final weights must equal those of an uninterrupted run.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from launching import (
    PATIENCE_S,
    ROOT,
    TINY,
    Job,
    is_running,
    last_step,
    python_main,
    wait_for,
)
from netns_hosts import HostsUnavailable, TwoHosts
from runs import succeed

RANKS = (2, 1)  # number of ranks on each host
STEPS = 80
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    "model.n_embd=48",
    "data.block_size=64",
    "data.truncate=0.2",
    "run.name=run",
    "trainer.micro_batch_size=4",
    "trainer.eval_every=25",
    "snapshot.every_steps=8",
    "ddp.timeout_s=10",
]
USUAL = [*SETTINGS, "trainer.batch_size=24", f"trainer.max_steps={STEPS}"]
# A host takes seconds to come back, and the others must still be training then.
LONG = [*SETTINGS, "trainer.batch_size=96", "trainer.max_steps=90"]
QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
# Without this variable, no new agent can join a running one.
REPLACEABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Cluster:
    """The same command running on both hosts, with one run directory."""

    def __init__(
        self,
        hosts: TwoHosts,
        cwd: Path,
        settings: list[str] = USUAL,
        nodes: str = "2",
        **extra: str,
    ) -> None:
        self.hosts, self.cwd, self.settings, self.nodes, self.extra = (
            hosts,
            cwd,
            settings,
            nodes,
            extra,
        )
        self.run = cwd / "outputs" / "run"
        self.jobs: dict[int, Job] = {}
        self.start(1)  # this host waits for the other one, which hosts the rendezvous
        self.start(0)

    def start(self, host: int) -> None:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.nodes}",
            f"--nproc_per_node={RANKS[host]}",
            "--rdzv_backend=c10d",
            f"--rdzv_conf={QUICK}",
            f"--rdzv_endpoint={self.hosts.names[0]}:29500",
            "--rdzv_id=run",
            "--max_restarts=3",
        ]
        command = [*torchrun, str(ROOT / "main.py"), *self.settings]
        self.jobs[host] = self.hosts.start(host, command, self.cwd, **self.extra)

    def kill_agent(self, host: int) -> None:
        """SIGKILL only the agent. Its workers die with it."""
        orphans = self.jobs[host].kill_agent()
        assert len(orphans) == RANKS[host]
        wait_for(lambda: not any(map(is_running, orphans)), what="the end of the orphans")

    def reach(self, step: int, ranks: int = 3) -> None:
        """Wait until an attempt with this world size has taken a step."""
        done = lambda: self.world_sizes()[-1:] == [ranks] and last_step(self.run) >= step  # noqa: E731
        wait_for(done, what=f"step {step} on {ranks} ranks")

    def wait(self) -> None:
        for host in (0, 1):
            assert self.jobs[host].wait() == 0, self.text()

    def text(self) -> str:
        return "\n".join(
            f"--- host {host + 1}\n{job.text()}" for host, job in sorted(self.jobs.items())
        )

    def log(self) -> str:
        path = self.run / "main.rank0.log"
        return path.read_text() if path.exists() else ""

    def world_sizes(self) -> list[int]:
        """Return the world sizes of the attempts, in order."""
        return [int(size) for size in re.findall(r"parameters, on (\d+) x cpu", self.log())]


def weights(run: Path) -> bytes:
    return (run / "snapshots" / f"step_{STEPS:08d}" / "model.safetensors").read_bytes()


def validation_loss(run: Path) -> float:
    return json.loads((run / "result.json").read_text())["val_loss"]


@contextmanager
def two_hosts():
    try:
        hosts = TwoHosts()
    except HostsUnavailable as reason:
        pytest.skip(f"there cannot be two hosts here: {reason}")
    with hosts:
        yield hosts


@pytest.fixture
def hosts():
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Train an uninterrupted run. Return its weights."""
    with two_hosts() as pair:
        cluster = Cluster(pair, tmp_path_factory.mktemp("uninterrupted"))
        cluster.wait()
    assert cluster.world_sizes() == [3]
    return weights(cluster.run)


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE_S)  # the test has four rendezvous
def test_worker_then_link_then_rendezvous_fail(hosts, tmp_path, uninterrupted):
    cluster = Cluster(hosts, tmp_path)
    cluster.reach(15)
    cluster.jobs[1].kill_worker(0)
    cluster.reach(35)
    assert cluster.world_sizes() == [3, 3]
    hosts.set_link_down()
    wait_for(lambda: "error: rank 2 has stalled" in cluster.log(), what="the stall to be detected")
    hosts.set_link_up()
    cluster.reach(55)
    assert cluster.world_sizes() == [3, 3, 3]
    cluster.kill_agent(0)
    # The other agent fails when the rendezvous is gone.
    assert cluster.jobs[1].wait() == 1, cluster.text()
    cluster.start(0)
    cluster.start(1)
    cluster.wait()
    assert cluster.world_sizes() == [3, 3, 3, 3]
    assert weights(cluster.run) == uninterrupted


@pytest.mark.slow
def test_host_then_agent_killed_and_started_again(hosts, tmp_path, uninterrupted):
    cluster = Cluster(hosts, tmp_path, **REPLACEABLE)
    cluster.reach(20)
    cluster.jobs[1].kill_tree()
    cluster.start(1)
    cluster.reach(50)
    assert cluster.world_sizes() == [3, 3]
    cluster.kill_agent(1)
    cluster.start(1)
    cluster.wait()
    assert cluster.world_sizes() == [3, 3, 3]
    assert weights(cluster.run) == uninterrupted


@pytest.mark.slow
def test_host_dies_and_comes_back_under_elastic_nodes(hosts, tmp_path):
    cluster = Cluster(hosts, tmp_path, LONG, nodes="1:2", **REPLACEABLE)
    cluster.reach(10)
    cluster.jobs[1].kill_tree()
    cluster.reach(12, ranks=2)
    cluster.start(1)
    cluster.wait()
    sizes = [size for size, _ in groupby(cluster.world_sizes())]
    assert sizes[-3:] == [3, 2, 3], cluster.text()
    single = tmp_path / "alone"
    single.mkdir()
    succeed([*python_main(), *LONG], single)
    assert abs(validation_loss(cluster.run) - validation_loss(single / "outputs" / "run")) < 1e-4
