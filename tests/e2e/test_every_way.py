"""Check every way to start a job: SIGKILL all of its processes and start it again.

The weights must have the same bits as those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launching import (
    PATIENCE_S,
    ROOT,
    TINY,
    Job,
    committed,
    python_main,
    torchrun,
    wait_for,
    write_application,
)
from runs import read_result, recorded_config, succeed, weights, write_files

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

# Two epochs of about eight steps. In the second epoch, all ranks of a job are held after step HELD,
# two steps after the snapshot of step SAVED. Then the job is killed.
SETTINGS = [
    *TINY,
    "model.dropout=0.1",
    "data.truncate=0.004",
    "trainer.max_epochs=2",
    "trainer.max_steps=null",
    "trainer.device=cpu",
    "run.name=job",
]
SAVED, HELD = 8, 10
RATES = (0.001, 0.002)  # learning rates of the two jobs of a sweep

# Code of a user's file: all ranks wait after a step until the file `go` exists.
HOLD = f"""
import os, time
from pathlib import Path
from mingpt_ddp.registry import acts

HERE = Path(__file__).parent

@acts("update")
def hold(step, weights):
    if step == {HELD} and not (HERE / "go").exists():
        (HERE / f"held.{{os.getpid()}}").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
"""
# None of these scripts has `if __name__ == "__main__"`.
FILES = {
    "train.py": "import mingpt_ddp, sys\nmingpt_ddp.train(sys.argv[1:], nproc=2)\n",
    "sweep.py": "import mingpt_ddp, sys\nmingpt_ddp.sweep(sys.argv[1:])\n",
    "notebook.py": f"""
import nbclient, nbformat, sys

code = f"import mingpt_ddp\\nmingpt_ddp.train({{sys.argv[1:]}}, nproc=2)"
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
# What the kernel logs of itself goes to a file. ipykernel can fail at the end of a kernel: one
# thread closes the sockets to which another still writes.
with open("kernel.log", "a") as log:
    client = nbclient.NotebookClient(book, timeout={PATIENCE_S}, startup_timeout={PATIENCE_S})
    client.execute(stderr=log)
print(*(output.get("text", "") for output in book.cells[0].outputs))
""",
    "site/hold.py": HOLD,
}


def as_they_are(words: list[str]) -> list[str]:
    return words


def in_node(words: list[str]) -> list[str]:
    """Adapt overrides to the application in docs/python.md, whose node `gpt` has our groups."""
    named = [re.sub(r"^(\+?)", r"\1gpt.", word) for word in words]
    return [word.replace("gpt.model=", "model@gpt.model=") for word in named]


@dataclass(frozen=True)
class Way:
    """A way to start one job, or a sweep of two jobs."""

    command: list[str]  # the command without the overrides of the job
    ranks: int = 1
    is_sweep: bool = False
    n_concurrent: int = 1  # number of jobs that run at the same time
    marks: Any = ()  # SLOW or INTEGRATION; () if the ordinary suite runs it
    needs: str = "mingpt_ddp"  # module without which the test is skipped
    # Adapts overrides of main.py to the command.
    words: Callable[[list[str]], list[str]] = as_they_are

    @property
    def rates(self) -> tuple[float, ...]:
        return RATES if self.is_sweep else RATES[:1]

    def start(self, cwd: Path) -> Job:
        rates = ",".join(map(str, self.rates))
        hold = f"+optimizer.code={cwd}/site/hold.py"
        words = self.words([*SETTINGS, f"optimizer.lr={rates}", hold])
        return Job([*self.command, *words], cwd, PYTHONPATH=str(ROOT))


def sweep(*command: str, **named: Any) -> Way:
    return Way([*command], is_sweep=True, **named)


SLOW, INTEGRATION = pytest.mark.slow, pytest.mark.integration
MAIN, PYTHON = python_main(), sys.executable
LAUNCH = [PYTHON, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2"]
TWO = "ddp.nproc_per_node=2"
SUBMITIT = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10"]
RAY = ["sweep=ray", "hydra.launcher.ray.init.num_cpus=2"]
WAYS = {
    "one process": Way(MAIN),
    "nproc_per_node": Way([*MAIN, TWO], 2, marks=SLOW),
    "spawn": Way([*MAIN, TWO, "ddp.launcher=spawn"], 2, marks=SLOW),
    "torchrun": Way(torchrun(4), 4, marks=SLOW),
    "launch": Way([*LAUNCH, MAIN[1]], 2, marks=SLOW, needs="torch.distributed.launch"),
    "sweep in turn": sweep(*MAIN, "-m", marks=SLOW),
    "sweep in parallel": sweep(*MAIN, "-m", "sweep.parallel=2", n_concurrent=2, marks=SLOW),
    "sweep in lock-step": sweep(*torchrun(2), "-m", ranks=2, marks=SLOW),
    "another sweeper": sweep(*MAIN, "-m", "hydra/sweeper=basic"),
    "submitit": sweep(*MAIN, "-m", *SUBMITIT, n_concurrent=2, marks=INTEGRATION, needs="submitit"),
    "ray": sweep(*MAIN, "-m", *RAY, n_concurrent=2, marks=INTEGRATION, needs="ray"),
    "train() of a script": Way([PYTHON, "train.py"], 2),
    "sweep() of a script": sweep(PYTHON, "sweep.py", marks=SLOW),
    "notebook": Way([PYTHON, "notebook.py"], 2, marks=INTEGRATION, needs="nbclient"),
    "application": Way([PYTHON, "app.py"], words=in_node),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int, float], str]:
    """Return a function that trains without a kill, with a number of ranks and a learning rate.

    It returns the digest of the last weights. Equal runs are trained once.
    """
    done: dict[tuple[int, float], str] = {}

    def get(ranks: int, rate: float) -> str:
        if (ranks, rate) not in done:
            cwd = tmp_path_factory.mktemp("undisturbed")
            ranks_here = [f"ddp.nproc_per_node={ranks}"] if ranks > 1 else []
            succeed([*MAIN, *SETTINGS, f"optimizer.lr={rate}", *ranks_here], cwd)
            done[ranks, rate] = digest(cwd / "outputs" / "job")
        return done[ranks, rate]

    return get


def processes(cwd: Path) -> list[int]:
    """Return the processes of a job. They inherit its working directory."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # the process has ended
            if os.readlink(link) == str(cwd):
                found.append(int(link.parent.name))
    return found


def kill_all(cwd: Path) -> None:
    """SIGKILL every process of a job, the oldest first, so that no parent restarts a child."""

    def are_gone() -> bool:
        for pid in sorted(processes(cwd)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes(cwd)

    wait_for(are_gone, what="the end of all processes")


@pytest.fixture
def cwd(tmp_path):
    """Provide the working directory of a job. At the end, kill the job's remaining processes."""
    write_files(tmp_path, FILES)
    write_application(tmp_path)
    yield tmp_path
    kill_all(tmp_path)


def digest(run: Path) -> str:
    """Return the SHA-256 of the last weights, which is short enough for a failure message."""
    return hashlib.sha256(weights(run)).hexdigest()


def runs(cwd: Path) -> list[Path]:
    return [path.parent for path in (cwd / "outputs").rglob("main.rank0.log")]


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=name, marks=way.marks) for name, way in WAYS.items()]
)
def test_killed_and_started_again(way, undisturbed, cwd):
    if find_spec(way.needs) is None:
        pytest.skip(f"{way.needs} is not installed")
    job = way.start(cwd)

    def is_held() -> bool:
        n_held = len(list(cwd.glob("site/held.*")))
        n_saved = sum(SAVED in committed(run) for run in runs(cwd))
        return (n_held, n_saved) == (way.ranks * way.n_concurrent, way.n_concurrent)

    wait_for(lambda: is_held() or job.process.poll() is not None, what="all ranks to be held")
    assert job.process.poll() is None, job.text()
    kill_all(cwd)
    killed = runs(cwd)
    assert not any((run / "result.json").exists() for run in killed)

    (cwd / "site" / "go").touch()
    job = way.start(cwd)
    assert job.wait() == 0, job.text()
    assert not re.search(r"Traceback|resource_tracker|frame #", job.text()), job.text()
    wait_for(lambda: not processes(cwd), what="the end of all processes")
    for run in killed:
        log = (run / "main.rank0.log").read_text()
        assert f"resuming from the snapshot of step {SAVED} " in log
    assert {read_result(run)["status"] for run in runs(cwd)} == {"complete"}
    found = [(recorded_config(run)["optimizer"]["lr"], digest(run)) for run in runs(cwd)]
    assert sorted(found) == [(rate, undisturbed(way.ranks, rate)) for rate in way.rates]
