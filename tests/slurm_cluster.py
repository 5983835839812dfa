"""Run a SLURM cluster with two nodes on one machine, with the real sbatch and srun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from launching import PATIENCE_S, environment, is_running, wait_for
from ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")  # Debian: apt-get install slurm-wlm munge
NODES = ("n1", "n2")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may only start once its old credentials have expired, after cred_expire (by default 120) seconds.
AuthInfo=socket={home}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmdParameters=config_overrides
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobRequeue=1
KillWait=5
MessageTimeout=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""  # noqa: E501


class SlurmUnavailable(Exception):
    """This machine or this user cannot run a cluster. The message says why."""


class Slurm:
    """The cluster. The end of the `with` block kills all processes that it started."""

    def __init__(self, home: Path) -> None:
        """
        Raises:
            SlurmUnavailable: A program is missing, or the user is not root.
        """
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if sys.platform != "linux" or missing or os.geteuid() != 0:
            raise SlurmUnavailable(
                f"needs {', '.join(missing)}" if missing else "needs Linux and root"
            )
        self.home = home
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def call(self, *args: str, **extra: str) -> str:
        """Run a SLURM command on this cluster. Return its output."""
        done = subprocess.run(
            args, env=self.environment(**extra), capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
        return done.stdout

    def environment(self, **extra: str) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {
            **environment(self.home),
            "PATH": path,
            "SLURM_CONF": str(self.home / "slurm.conf"),
            **extra,
        }

    def submit(
        self, script: Path, cwd: Path, options: list[str], args: list[str], **extra: str
    ) -> str:
        """Submit a batch job and return its id. Its output goes to `cwd/<id>.out`."""
        options = [f"--chdir={cwd}", f"--output={cwd}/%j.out", *options]
        return self.call("sbatch", "--parsable", *options, str(script), *args, **extra).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that scontrol shows for a job, such as JobState and ExitCode."""
        fields = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, number: str, *states: str) -> None:
        wait_for(
            lambda: self.job(number)["JobState"] in states,
            what=f"job {number} is {' or '.join(states)}",
        )

    def _start(self) -> None:
        self.home.chmod(0o755)
        ports = free_ports(3)
        host = socket.gethostname().split(".")[0]
        (self.home / "slurm.conf").write_text(CONF.format(home=self.home, host=host, ports=ports))
        (self.home / "state").mkdir()
        key = self.home / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [
            f"--{name}={self.home}/munge.{name}"
            for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._serve("munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_for((self.home / "munge.socket").exists, what="munged")
        self._serve("slurmctld", "-D", "-i")
        for node in NODES:
            self._serve("slurmd", "-D", "-N", node)
        wait_for(self._idle, what="the nodes")

    def _serve(self, *command: str) -> None:
        number = len(self._servers)
        with open(self.home / f"{command[0]}.{number}.txt", "wb") as out:
            server = subprocess.Popen(
                command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._servers.append(server)

    def _idle(self) -> bool:
        for server in self._servers:
            assert server.poll() is None, f"{server.args}: {self._logs()}"
        command = ["sinfo", "--noheader", "--partition=usual", "--Node", "--format=%T"]
        answer = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
        return answer.stdout.split() == ["idle"] * len(NODES)

    def _logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.home.glob("*.txt")))

    def _stop(self) -> None:
        """Cancel the jobs, then stop the daemons. A slurmd that exits leaves its jobs running."""
        left = [server for server in self._servers if server.poll() is None]
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.call("scancel", "--quiet", "--user=root")
            wait_for(
                lambda: not self.call("squeue", "--noheader").split(), what="the end of all jobs"
            )
        for server in reversed(left):
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(PATIENCE_S)
        for server in left:
            server.kill()
            server.wait()
        for pid in self._jobs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _jobs(self) -> list[int]:
        """Return the ids of processes that still belong to jobs of this cluster."""
        marker, found = f"SLURM_CONF={self.home / 'slurm.conf'}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marker in path.read_bytes().split(b"\0") and is_running(int(path.parent.name)):
                    found.append(int(path.parent.name))
        return found
