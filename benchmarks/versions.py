"""Compare the speed of this checkout with another revision of the project.

Compare the revisions before and after a change of the code, to show that sampling, starts and
recoveries have kept their speed. `python -m mingpt_ddp versions` compares the speed of training
itself, and `same_weights.py` compares the bits.

Both checkouts run the same commands in turns, in the same Python environment and in new processes.
Steps are read from `metrics.jsonl`, so log messages may differ. The figures are:

one, ten       characters per second of CPU time, sampled in one stream and in ten by a model of
               medium size; the difference of a long and a short text excludes startup
start          seconds from the command to the first logged step, with one process
start2         the same with ddp.nproc_per_node=2
recovery       seconds from kill -9 of a worker to the first new step, with two ranks and
               snapshot.every_steps=10
exited         seconds from this kill until the other worker has exited
resumed        seconds from this kill until the new workers have read the snapshot
loss           seconds of the whole process of experiment=shakespeare_char_cpu_fast, which must
               reach a loss of 1.88

    MINGPT_SHAKESPEARE=input.txt python benchmarks/versions.py --other REVISION
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    alternate,
    cell,
    children_cpu_seconds,
    compare,
    corpus_path,
    environment,
    last_step,
    parser,
    report,
    spread,
)
from stopwatch import find_worker, has_open_file

from mingpt_ddp.study.versions.code_version import find_commit, find_version

MID = [
    "model=gpt_mini",
    "model.n_embd=384",
    "model.dropout=0",
    "data.block_size=256",
    "trainer.batch_size=16",
]
TINY = [
    "model=gpt_nano",
    "data.block_size=32",
    "trainer.batch_size=12",
    "trainer.log_every=1",
    "data.truncate=0.1",
]
QUIET = [
    "trainer.max_epochs=null",
    "trainer.eval_every=null",
    "trainer.sample_every=null",
    "trainer.device=cpu",
]
LOWER_IS_BETTER = ("start", "start2", "recovery", "exited", "resumed", "loss")
PATIENCE_S = 300.0
_names = count()


class Checkout:
    """A checkout of the project, whose commands run in a scratch directory."""

    def __init__(self, home: Path, scratch: Path, text: Path) -> None:
        self.home = home
        self.scratch = scratch
        self.data = [
            "data=shakespeare",
            f"data.path={text}",
            "data.sha256=null",
            f"data.cache_dir={scratch / 'cache'}",
        ]
        self.environment = {**environment(), "PYTHONPATH": str(home)}
        self._check_package()

    def _check_package(self) -> None:
        """Exit unless commands import the package of this checkout, not an installed one."""
        command = [sys.executable, "-c", "import mingpt_ddp; print(mingpt_ddp.__file__)"]
        done = subprocess.run(
            command, cwd=self.scratch, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        if done.stdout.strip() != str(self.home / "mingpt_ddp" / "__init__.py"):
            sys.exit(f"{self.home} is not used: mingpt_ddp is {done.stdout.strip() or 'missing'}")

    def start(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(self.home / script), *arguments]
        with (self.scratch / "output.txt").open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.scratch, env=self.environment, stdout=output, stderr=output
            )

    def train(self, *overrides: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a new run, and return its process and its directory."""
        name = f"run-{next(_names)}"
        process = self.start("main.py", *self.data, *QUIET, f"run.name={name}", *overrides)
        return process, self.scratch / "outputs" / name

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait(PATIENCE_S) != 0:
            sys.exit(f"{self.home} failed:\n{(self.scratch / 'output.txt').read_text()[-2000:]}")


def prepare_checkouts(other: str, scratch: Path) -> dict[str, Checkout]:
    """Prepare this checkout and another one, each with a directory of its own in `scratch`.

    Args:
        other: A commit or branch of this checkout, or the directory of another one.
        scratch: A temporary directory.
    """
    home_of_other = find_version(other, find_commit(other), []).directory
    checkouts = {}
    for name, home in (("this", ROOT), ("other", home_of_other)):
        (scratch / name).mkdir()
        checkouts[name] = Checkout(home, scratch / name, corpus_path())
    return checkouts


def wait_for_step(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    wait_until(lambda: last_step(run) >= step, process, run, f"step {step}")


def wait_until(
    is_over: Callable[[], bool], process: subprocess.Popen[bytes], run: Path, what: str
) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_over():
        if process.poll() is not None or time.monotonic() > until:
            output = (run.parents[1] / "output.txt").read_text()
            sys.exit(f"{run} did not reach {what}:\n{output[-2000:]}")
        time.sleep(0.005)


def workers(ranks: int) -> list[str]:
    """Build the overrides that start this number of ranks. A single rank needs none."""
    return [f"ddp.nproc_per_node={ranks}"] if ranks > 1 else []


def sampling(samples: int, checkout: Checkout) -> float:
    """Measure the sampled characters per second of CPU time, with a model trained for one step."""
    run = checkout.scratch / "outputs" / f"model-{checkout.home.name}"
    if not run.exists():
        process = checkout.start(
            "main.py",
            *checkout.data,
            *QUIET,
            *MID,
            f"run.name={run.name}",
            "trainer.max_steps=1",
        )
        checkout.finish(process)

    def seconds(characters: int) -> float:
        begin = children_cpu_seconds()
        words = [
            f"snapshot={run}",
            f"max_new_tokens={characters}",
            f"samples={samples}",
            "device=cpu",
        ]
        checkout.finish(checkout.start("sample.py", *words))
        return children_cpu_seconds() - begin

    short, long = (200, 8200) if samples == 1 else (50, 2050)
    return samples * (long - short) / (seconds(long) - seconds(short))


def start(ranks: int, checkout: Checkout) -> float:
    """Measure the seconds until the first step is logged."""
    begin = time.perf_counter()
    process, run = checkout.train(*TINY, "trainer.max_steps=2", *workers(ranks))
    wait_for_step(process, run, 1)
    seconds = time.perf_counter() - begin
    checkout.finish(process)
    return seconds


def recovery(event: str, checkout: Checkout) -> float:
    """Measure the seconds from SIGKILL of a worker to an event.

    Args:
        event: One of exited, resumed, and recovery, which is the first new step.
        checkout: The checkout.
    """
    # A step takes 20 ms, so the run is still training when it is killed below.
    process, run = checkout.train(
        *TINY, *workers(2), "trainer.max_steps=100000", "snapshot.every_steps=10"
    )
    wait_for_step(process, run, 35)
    survivor = find_worker(process.pid, rank=0)
    killed = find_worker(process.pid, rank=1)
    log = run / "main.rank0.log"
    begin = time.perf_counter()
    os.kill(killed, signal.SIGKILL)
    wait_until(
        lambda: not has_open_file(survivor, f"/{log.name}"),
        process,
        run,
        "the end of the other worker",
    )
    if event == "resumed":
        wait_until(lambda: "resuming from" in log.read_text(), process, run, "its snapshot")
    elif event == "recovery":
        wait_for_step(process, run, last_step(run) + 1)
    seconds = time.perf_counter() - begin
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)
    return seconds


def to_loss(checkout: Checkout) -> float:
    """Measure the seconds of a whole run, which must reach the loss. Exit if it does not."""
    begin = time.perf_counter()
    name = f"run-{next(_names)}"
    process = checkout.start(
        "main.py",
        "experiment=shakespeare_char_cpu_fast",
        *checkout.data[1:],
        "trainer.device=cpu",
        f"run.name={name}",
    )
    checkout.finish(process)
    seconds = time.perf_counter() - begin
    loss = json.loads((checkout.scratch / "outputs" / name / "result.json").read_text())["val_loss"]
    if loss > 1.88:
        sys.exit(f"{checkout.home}: validation loss {loss}, above 1.88")
    return seconds


FIGURES: dict[str, Callable[[Checkout], float]] = {
    "one": partial(sampling, 1),
    "ten": partial(sampling, 10),
    "start": partial(start, 1),
    "start2": partial(start, 2),
    "recovery": partial(recovery, "recovery"),
    "exited": partial(recovery, "exited"),
    "resumed": partial(recovery, "resumed"),
    "loss": to_loss,
}


def measure(figure: str, checkouts: dict[str, Checkout], repetitions: int) -> dict[str, Any]:
    """Measure a figure in both checkouts, and compute the paired ratios."""
    measures = {name: partial(FIGURES[figure], each) for name, each in checkouts.items()}
    for once in measures.values():
        once()  # fills the disk caches, compiles the bytecode and encodes the text
    values = alternate(figure, measures, repetitions)
    spreads = {name: spread(each) for name, each in values.items()}
    return {**spreads, "ratio": compare(values["this"], values["other"])}


def table_row(figure: str, measured: dict[str, Any]) -> list[str]:
    return [
        figure,
        cell(measured["this"], ",.4g"),
        cell(measured["other"], ",.4g"),
        cell(measured["ratio"], ".3f"),
        "lower" if figure in LOWER_IS_BETTER else "higher",
    ]


def main() -> None:
    options = parser(__doc__, "versions")
    options.add_argument(
        "--other", required=True, metavar="REVISION", help="a commit, a branch or a directory"
    )
    options.add_argument(
        "--figures",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        help="figures to measure (default: all)",
    )
    options.add_argument(
        "--repetitions", type=int, default=5, help="runs of each figure (default: %(default)s)"
    )
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        checkouts = prepare_checkouts(chosen.other, Path(scratch))
        results = {
            figure: measure(figure, checkouts, chosen.repetitions) for figure in chosen.figures
        }
    header = ["figure", "this", "other", "this / other, pair by pair", "better is"]
    rows = [table_row(figure, measured) for figure, measured in results.items()]
    report(chosen.out, {"figures": results, "threads": 1}, header, rows)


if __name__ == "__main__":
    main()
