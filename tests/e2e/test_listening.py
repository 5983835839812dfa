"""Check that local workers listen only on loopback.

Anybody who can reach their store can stop or change the run.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path

import pytest
from launching import TINY, Job, last_step, open_files, python_main, read, wait_for
from netns_hosts import HostsUnavailable, TwoHosts
from ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
LONG = [
    *TINY,
    "trainer.device=cpu",
    "trainer.max_steps=100000",
    "snapshot.every_steps=100",
    "run.name=run",
]
LISTEN = "0A"  # TCP_LISTEN in <net/tcp_states.h>


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants, including children of all its threads."""
    pids = [pid]
    for parent in pids:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            found = read(parent, path.relative_to(f"/proc/{parent}")).split()
            pids += [int(child) for child in found if int(child) not in pids]
    return pids


def listening(pid: int) -> set[tuple[int, str, int]]:
    """Return the process id, address and port of every listening TCP socket in a process tree."""
    found = set()
    for process in process_tree(pid):
        inodes = {
            inode
            for link in open_files(process)
            for inode in re.findall(r"^socket:\[(\d+)\]$", link)
        }
        for table in ("tcp", "tcp6"):
            for line in read(process, f"net/{table}").splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    found.add((process, decode(address), int(port, 16)))
    return found


def decode(address: str) -> str:
    """Decode an address in /proc/net/tcp, which has 32-bit words in native byte order."""
    groups = [bytes.fromhex(address[start : start + 8]) for start in range(0, len(address), 8)]
    ip = ipaddress.ip_address(
        b"".join(group[::-1] if sys.byteorder == "little" else group for group in groups)
    )
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def beyond_loopback(sockets: set[tuple[int, str, int]]) -> set[tuple[int, str, int]]:
    return {socket for socket in sockets if not ipaddress.ip_address(socket[1]).is_loopback}


def watch(job: Job, cwd: Path) -> None:
    """Record the listening sockets of a job until it has logged a few steps. Then stop the job."""
    seen: set[tuple[int, str, int]] = set()

    def is_training() -> bool:
        seen.update(listening(job.process.pid))
        assert job.process.poll() is None, job.text()
        return last_step(cwd / "outputs" / "run") >= 5

    wait_for(is_training, what="step 5")
    workers = set(job.workers())
    job.kill_tree()
    assert not beyond_loopback(seen)
    # A process of its own hosts the store. Before that, the launcher has the socket for a moment.
    store = {port for pid, _, port in seen if pid not in {job.process.pid, *workers}}
    assert store, "the store was not listening"
    assert len(workers & {pid for pid, _, port in seen if port not in store}) == 2, (
        "gloo was not listening"
    )


@pytest.mark.parametrize("launcher", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_local_workers(launcher, tmp_path):
    watch(
        Job([*python_main(), "ddp.nproc_per_node=2", f"ddp.launcher={launcher}", *LONG], tmp_path),
        tmp_path,
    )


@pytest.mark.slow
def test_local_workers_where_the_host_name_is_an_address(tmp_path):
    """By default, gloo listens on the address of the host name, which often is not loopback."""
    try:
        hosts = TwoHosts()
    except HostsUnavailable as reason:
        pytest.skip(f"no network namespaces: {reason}")
    with hosts:
        watch(hosts.start(0, [*python_main(), "ddp.nproc_per_node=2", *LONG], tmp_path), tmp_path)


def test_a_rank_started_by_hand_can_be_reached_from_other_machines(tmp_path):
    """A scheduler may set MASTER_ADDR=localhost on the first machine and its name on the others."""
    port = free_port()
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    job = Job([*python_main(), *LONG], tmp_path, RANK="0", WORLD_SIZE="2", **where)

    def sockets() -> set[tuple[int, str, int]]:
        assert job.process.poll() is None, job.text()
        return {socket for socket in listening(job.process.pid) if socket[2] == port}

    wait_for(sockets, what="the store")
    found = sockets()
    job.kill_tree()
    assert beyond_loopback(found)
