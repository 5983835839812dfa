"""Compare the time of a training step of this checkout with that of another one of the project.

Both train the same configuration at the same time, but in turn: while one trains a block of steps,
the other waits at a step's end without work. A pair of blocks gives one ratio, so start-up costs
nothing and a slower phase of the machine meets both.

small, mid    nanoGPT's CPU shapes, one rank with one thread
small2, mid2  the same on two ranks, with one thread each

    git worktree add /tmp/before REVISION
    MINGPT_SHAKESPEARE=input.txt python benchmarks/step_speed.py --other /tmp/before

To measure what a feature costs, name two checkouts of one revision, and give this one what it
takes: --words +task.code=$PWD/mine.py task.name=mine
"""

from __future__ import annotations

import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, corpus_path, environment, parser, report
from versions import MID

SHAPES = {
    "small": ["model=gpt_micro", "data.block_size=64", "trainer.batch_size=12"],
    "mid": MID,
}
STEPS = {"small": 60, "mid": 4}  # of a block
GATE = "MINGPT_STEP_GATE"  # environment variable with the directory in which a worker waits
BLOCK = "MINGPT_STEP_BLOCK"
POLL_S = 0.002


def worker() -> None:
    """Train as a user does, and wait for a file at the end of each block."""
    checkout = os.environ["PYTHONPATH"]
    sys.path.insert(0, checkout)  # common.py has put its own first
    import mingpt_ddp
    from mingpt_ddp.metrics import processor

    assert mingpt_ddp.__file__ == f"{checkout}/mingpt_ddp/__init__.py", mingpt_ddp.__file__
    gate = Path(os.environ[GATE])
    block = int(os.environ[BLOCK])
    step_done = processor.MetricsProcessor.step_done
    began = time.perf_counter()

    def wait_at_the_end_of_a_block(self: processor.MetricsProcessor, step: int, *more: Any) -> None:
        nonlocal began
        step_done(self, step, *more)  # another checkout may take less
        number, rest = divmod(step, block)
        if rest:
            return
        seconds = time.perf_counter() - began
        if os.environ["RANK"] == "0":
            partial = gate / "partial"
            partial.write_text(str(seconds))
            partial.rename(gate / f"done{number}")
        while not (gate / f"go{number}").exists():
            time.sleep(POLL_S)
        began = time.perf_counter()

    processor.MetricsProcessor.step_done = wait_at_the_end_of_a_block  # type: ignore[method-assign]
    runpy.run_module("mingpt_ddp", run_name="__main__")


class Side:
    """A run of one checkout that trains a block at a time."""

    def __init__(
        self, checkout: Path, figure: str, blocks: int, scratch: Path, more: list[str]
    ) -> None:
        name, ranks = figure.rstrip("2"), 2 if figure.endswith("2") else 1
        self.gate = scratch / "gate"
        self.gate.mkdir(parents=True)
        self.block = 0
        variables = {
            **environment(threads=1),
            "PYTHONPATH": str(checkout),
            GATE: str(self.gate),
            BLOCK: str(STEPS[name]),
        }
        words = [
            "data=shakespeare",
            f"data.path={corpus_path()}",
            "data.sha256=null",
            f"data.cache_dir={scratch / 'cache'}",
            *SHAPES[name],
            "trainer.device=cpu",
            "trainer.precision=fp32",
            f"trainer.max_steps={STEPS[name] * (blocks + 1)}",
            "trainer.max_epochs=null",
            "trainer.log_every=10",
            "trainer.eval_every=1000000",
            "trainer.eval_steps=1",
            "trainer.sample_every=null",
            "snapshot.every_steps=null",
            f"run.root={scratch / 'runs'}",
            "run.name=run",
            *more,
        ]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        self.process = subprocess.Popen(
            [sys.executable, *torchrun, __file__, *words],
            env=variables,
            cwd=scratch,
            stdout=subprocess.DEVNULL,
            stderr=(scratch / "errors").open("w"),
        )
        self.errors = scratch / "errors"
        self.seconds()  # of the first block, which warms up

    def seconds(self) -> float:
        """Wait for the end of the next block; return what it took."""
        self.block += 1
        done = self.gate / f"done{self.block}"
        while not done.exists():
            if self.process.poll() is not None:
                sys.exit(f"a run ended: {self.errors.read_text()[:3000]}")
            time.sleep(POLL_S)
        return float(done.read_text())

    def train_block(self) -> float:
        (self.gate / f"go{self.block}").touch()
        return self.seconds()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(figure: str, other: Path, pairs: int, words: list[str]) -> list[float]:
    """Return the speed of this checkout over that of the other, by pair.

    Args:
        words: overrides of this checkout alone.
    """
    ratios = []
    with tempfile.TemporaryDirectory(prefix="step-speed-") as name:
        sides = []
        try:
            for label, checkout, more in (("this", ROOT, words), ("other", other, [])):
                sides.append(Side(checkout, figure, pairs + 1, Path(name, label), more))
            this, that = sides
            for pair in range(pairs):
                order = (this, that) if pair % 2 else (that, this)
                seconds = {side: side.train_block() for side in order}
                ratios.append(seconds[that] / seconds[this])
                print(f"{figure}, pair {pair + 1}: {ratios[-1]:.3f}", flush=True)
        finally:
            for side in sides:
                side.close()
            time.sleep(2)  # in which workers notice that their agent is gone
    return ratios


def main() -> None:
    arguments = parser(__doc__, "step_speed")
    arguments.add_argument("--other", type=Path, required=True, help="the other checkout")
    arguments.add_argument("--pairs", type=int, default=10)
    arguments.add_argument("--figures", nargs="+", default=["small", "mid", "small2", "mid2"])
    arguments.add_argument("--words", nargs="+", default=[], help="overrides of this checkout")
    chosen = arguments.parse_args()
    other = chosen.other.resolve()
    found = {
        figure: compare(figure, other, chosen.pairs, chosen.words) for figure in chosen.figures
    }
    rows = []
    for figure, ratios in found.items():
        low, *_, high = statistics.quantiles(ratios, n=10)
        spread = f"{low:.3f} .. {high:.3f}"
        rows.append([figure, f"{statistics.median(ratios):.3f}", spread, str(len(ratios))])
    header = ["figure", "speed against the other checkout", "10% .. 90% of pairs", "pairs"]
    report(chosen.out, {"ratios": found}, header, rows)


if __name__ == "__main__":
    if GATE in os.environ:
        worker()
    else:
        main()
