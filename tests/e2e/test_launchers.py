"""Check runs on several machines, runs without torchrun, and runs that get signals.

Each must equal the uninterrupted run byte for byte. test_every_way.py checks the launchers of one
machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launching import (
    ROOT,
    TINY,
    WITH_DIGITS,
    Job,
    UnforkedJob,
    call,
    children,
    committed,
    hashes,
    is_running,
    python_main,
    torchrun,
    wait_for,
)
from ports import free_port
from runs import error_line, fail, read_result, succeed, train, weights

STEPS = 24
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "trainer.eval_every=12",
    "run.name=run",
]
# A run with these settings is slow enough to be killed in mid-run.
SLOW = [*SETTINGS, "trainer.max_steps=2000", "optimizer.schedule=constant"]
MAIN = str(ROOT / "main.py")
TWO = "ddp.nproc_per_node=2"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that trains with forked workers on a number of ranks.

    It returns the weights.
    """
    done: dict[int, bytes] = {}

    def get(ranks: int) -> bytes:
        if ranks not in done:
            root = tmp_path_factory.mktemp("uninterrupted")
            done[ranks] = weights(train(root, *SETTINGS, f"ddp.nproc_per_node={ranks}"), STEPS)
        return done[ranks]

    return get


ONE_MACHINE = {
    "torchrun": torchrun(2),
    "forkserver": [*python_main(), TWO],
    "spawn": [*python_main(), TWO, "ddp.launcher=spawn"],
}


def test_one_process_per_rank(tmp_path, uninterrupted):
    """A script sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The ranks start in any order."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [Job([*python_main(), *SETTINGS], tmp_path, RANK=rank, **shared) for rank in ("1", "0")]
    assert [job.wait() for job in jobs] == [0, 0], jobs[1].text()
    assert weights(tmp_path / "outputs" / "run", STEPS) == uninterrupted(2)


def test_a_sweep_of_one_process_per_rank(tmp_path):
    """Rank zero hosts one store, which all jobs and the sweep itself use."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sweep = ["-m", "optimizer.lr=0.001,0.002", "ddp.timeout_s=10"]
    command = [*python_main(), *sweep, *SETTINGS[:-1]]
    jobs = [Job(command, tmp_path, RANK=rank, **shared) for rank in ("1", "0")]
    assert [job.wait() for job in jobs] == [0, 0], jobs[1].text()
    runs = [path.parent for path in (tmp_path / "outputs").rglob("result.json")]
    assert [read_result(run)["status"] for run in runs] == ["complete"] * 2


def test_two_machines_under_torchrun(tmp_path, uninterrupted):
    """The machines have two ranks and one rank, and share a directory with one log per global rank.

    test_hosts.py covers rdzv_backend=c10d.
    """
    base = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--local-addr=127.0.0.1",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    ]
    jobs = []
    for node, ranks in enumerate((2, 1)):
        args = [f"--nproc_per_node={ranks}", f"--node_rank={node}"]
        jobs.append(Job([*base, *args, MAIN, *SETTINGS], tmp_path, GLOO_SOCKET_IFNAME="lo"))
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    run = tmp_path / "outputs" / "run"
    assert sorted(p.name for p in run.glob("main.rank*.log")) == [
        f"main.rank{rank}.log" for rank in range(3)
    ]
    assert read_result(run)["world_size"] == 3
    assert weights(run, STEPS) == uninterrupted(3)


class Machines:
    """Two machines without torchrun, with one rank and two ranks.

    The variable RANK is the first global rank of each machine.
    """

    def __init__(self, cwd: Path, *overrides: str) -> None:
        self.cwd, self.overrides, self.run = cwd, overrides, cwd / "outputs" / "run"
        self.shared = {
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.jobs: dict[int, Job] = {}

    def start(self, machine: int) -> None:
        command = [*python_main(), f"ddp.nproc_per_node={machine + 1}", *self.overrides]
        self.jobs[machine] = Job(command, self.cwd, RANK=str(machine), **self.shared)

    def text(self) -> str:
        return "\n".join(
            f"--- machine {machine}\n{job.text()}" for machine, job in sorted(self.jobs.items())
        )

    def reach(self, attempt: int) -> None:
        """Wait until this attempt has taken a step and a snapshot is committed, so that the next
        attempt can resume.
        """

        def is_reached() -> bool:
            log = self.run / "main.rank0.log"
            attempts = log.read_text().split("parameters, on 3 x cpu")[1:] if log.exists() else []
            return (
                len(attempts) == attempt
                and " INFO step " in attempts[-1]
                and bool(committed(self.run))
            )

        wait_for(is_reached, what=f"attempt {attempt}")


@pytest.mark.slow
def test_two_machines_by_hand(tmp_path, uninterrupted):
    """The second machine waits for the first.

    The test kills a worker, and then the parent that hosts the store.
    """
    machines = Machines(tmp_path, *SETTINGS, "snapshot.every_steps=1", "snapshot.keep_last=1")
    machines.start(1)
    machines.start(0)
    machines.reach(1)
    machines.jobs[1].kill_worker(-1)
    machines.reach(2)
    assert "rank 2 was killed by SIGKILL" in machines.jobs[1].text()
    orphans = machines.jobs[0].kill_agent()
    wait_for(lambda: not any(map(is_running, orphans)), what="the end of the orphans")
    machines.start(0)
    assert [machines.jobs[machine].wait() for machine in (0, 1)] == [0, 0], machines.text()
    assert weights(machines.run, STEPS) == uninterrupted(3)
    for job in machines.jobs.values():
        assert not re.search(r"Traceback|resource_tracker|frame #", job.text()), job.text()


def test_a_user_error_on_two_machines_is_reported_once_on_each(tmp_path):
    machines = Machines(tmp_path, *SETTINGS, "data.block_size=9999")
    machines.start(0)
    machines.start(1)
    assert [machines.jobs[machine].wait() for machine in (0, 1)] == [2, 2]
    for machine, job in machines.jobs.items():
        *before, line = job.text().splitlines()
        assert [text.split(" local workers;")[0] for text in before] == (
            ["starting 2"] if machine else []
        )
        assert "data error: the training text has" in line
    assert not (tmp_path / "outputs").exists()


def test_killed_restarted_and_interrupted(tmp_path):
    """run.resume=never creates one new directory, not one for each restart.

    At the end, Ctrl-C reaches all processes of the terminal.
    """
    runs = tmp_path / "outputs"
    (runs / "run").mkdir(parents=True)
    job = Job([*ONE_MACHINE["forkserver"], *SLOW, "run.resume=never"], tmp_path)
    wait_for(lambda: committed(runs / "run-2"), what="a snapshot")
    job.kill_worker(-1)
    wait_for(
        lambda: "\nstep " in job.text().partition("resuming from the snapshot")[2],
        what="the resumption",
    )
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() == 0, job.text()
    assert "rank 1 was killed by SIGKILL" in job.text()
    assert "restart 1 of 3" in job.text()
    assert {path.name for path in runs.iterdir()} == {"run", "run-2"}
    assert read_result(runs / "run-2")["status"] == "preempted"
    assert "rerun the same command to resume" in job.text().splitlines()[-1]


def process_tree(pid: int) -> list[int]:
    """Return a process id and those of all its descendants."""
    return [pid, *(descendant for child in children(pid) for descendant in process_tree(child))]


@pytest.fixture
def slow_run(tmp_path):
    """Start a run of two forked workers with its own TMPDIR, whose path is short."""
    with tempfile.TemporaryDirectory(prefix="slow-run-") as directory:
        job = UnforkedJob([*ONE_MACHINE["forkserver"], *SLOW], tmp_path, TMPDIR=directory)
        job.tmpdir = Path(directory)
        wait_for(lambda: committed(tmp_path / "outputs" / "run"), what="a snapshot")
        yield job


def test_a_signal_to_all_processes(slow_run, tmp_path):
    """A scheduler may signal every process of a job. None of them leaves temporary files."""
    for pid in process_tree(slow_run.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert slow_run.wait() == 0, slow_run.text()
    assert read_result(tmp_path / "outputs" / "run")["status"] == "preempted"
    assert not [
        path
        for path in slow_run.tmpdir.iterdir()
        if path.name.startswith(("mingpt-", "torchelastic"))
    ]


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_loader_processes_leave_no_sockets(launcher, tmp_path):
    digits = [
        WITH_DIGITS,
        "experiment=digits_convnet",
        "data.num_workers=1",
        "run.name=run",
        "trainer.device=cpu",
        "trainer.max_epochs=null",
        "trainer.max_steps=1",
    ]
    with tempfile.TemporaryDirectory(prefix="t-") as tmpdir:
        text = succeed([*ONE_MACHINE[launcher], *digits], tmp_path, TMPDIR=tmpdir)
        assert "done: " in text.splitlines()[-1], "something follows the last line"
        assert not [*Path(tmpdir).glob("mingpt-*")]


@pytest.mark.slow
def test_odd_values_in_the_environment(tmp_path):
    """A long TMPDIR and OMP_NUM_THREADS=0 do no harm.

    The path of a socket may have at most 107 bytes, and OpenMP ignores a thread count below 1.
    """
    directory = tmp_path / ("t" * 100)
    directory.mkdir()
    job = UnforkedJob(
        [*ONE_MACHINE["forkserver"], *SETTINGS],
        tmp_path,
        TMPDIR=str(directory),
        OMP_NUM_THREADS="0",
    )
    assert job.wait() == 0, job.text()
    assert read_result(tmp_path / "outputs" / "run")["step"] == STEPS


def test_without_shared_memory(tmp_path):
    """In a container, /dev/shm may be read-only. Then semaphores are missing; ranks use gloo."""
    read_only = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o ro none /dev/shm && exec "$@"',
        "sh",
    ]
    if subprocess.run([*read_only, "true"], capture_output=True).returncode != 0:
        pytest.skip("only root can mount")
    succeed([*read_only, *ONE_MACHINE["forkserver"], *SETTINGS], tmp_path)
    assert read_result(tmp_path / "outputs" / "run")["step"] == STEPS


def test_mpirun(tmp_path, uninterrupted):
    """Open MPI's mpirun starts one process per rank, and sets these variables."""
    shared = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        {**shared, "OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_LOCAL_RANK": r} for r in ("1", "0")
    ]
    jobs = [Job([*python_main(), *SETTINGS], tmp_path, **variables) for variables in ranks]
    assert [job.wait() for job in jobs] == [0, 0], jobs[1].text()
    assert weights(tmp_path / "outputs" / "run", STEPS) == uninterrupted(2)


def test_more_ranks_than_micro_batches_of_the_snapshot(tmp_path):
    """The run is refused before anything is written. A complete run still shows its result."""
    settings = [*python_main(), *SETTINGS, "trainer.batch_size=8"]
    four = [*settings, "ddp.nproc_per_node=4"]
    succeed([*settings, TWO, "trainer.max_steps=4"], tmp_path)
    assert "done: " in succeed([*four, "trainer.max_steps=4"], tmp_path)

    def contents() -> dict[str, str]:
        """Leave out the lock file, in which each process writes its id."""
        found = hashes(tmp_path / "outputs" / "run")
        return {name: digest for name, digest in found.items() if name != ".lock"}

    before = contents()
    text = fail([*four, "trainer.max_steps=8"], tmp_path)
    error = "config error: trainer.batch_size=8 in micro-batches of 4 occupies 2 of 4 ranks"
    error_line(text, error)
    assert contents() == before


def test_a_batch_size_per_rank(tmp_path):
    """Two ranks train with twice the batch of one rank.

    The snapshot keeps the batch size, even if another number of ranks continues the run.
    """
    settings = [
        word for word in SETTINGS if "batch_size" not in word and not word.startswith("run.name")
    ]
    per_rank = [
        *python_main(),
        *settings,
        "trainer.batch_size_per_rank=6",
        "trainer.micro_batch_size=2",
    ]
    succeed([*per_rank, TWO, "trainer.max_steps=4"], tmp_path)
    (run,) = (tmp_path / "outputs").iterdir()
    assert read_result(run)["tokens"] == 4 * 12 * 16
    again = call([*per_rank, TWO], tmp_path)
    assert (
        "resuming from the snapshot of step 4" in again.stdout and read_result(run)["step"] == STEPS
    )
    for ranks, steps in ((3, STEPS + 2), (1, STEPS + 4)):
        succeed([*per_rank, f"ddp.nproc_per_node={ranks}", f"trainer.max_steps={steps}"], tmp_path)
        assert read_result(run)["tokens"] == steps * 12 * 16
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [run.name]
