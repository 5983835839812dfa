"""Compare the time to a validation loss on tinyshakespeare with nanoGPT.

nanoGPT trains as its README says for a CPU: context 64, batch 12, 4 layers, 4 heads, width 128, and
2,000 steps, which reach a loss of about 1.88. We train `experiment=shakespeare_char_cpu_fast`. The
time is measured over the whole process, including imports, evaluations and saves. Our time also
includes the encoding of the text. nanoGPT's prepare.py is not timed. Both losses are in nats per
character over the whole validation split, where each character counts once. Ours is from
result.json. nanoGPT's is from the checkpoint that it kept, which `nanogpt_loss.py` evaluates
afterwards.

The second figure is the loss that we reach in the time that nanoGPT takes, with
`experiment=shakespeare_bpe_cpu` and as many steps as fit. Its tokens are longer than characters.
Its loss is the loss on the same text, divided by the number of characters. The number of steps is
computed from the CPU times of nanoGPT's first run and of two short runs of this experiment, unless
--long-steps gives it.

    python benchmarks/time_to_loss.py --nanogpt ~/nanoGPT
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    alternate,
    cell,
    compare,
    corpus_path,
    environment,
    log,
    nats_per_character,
    parser,
    report,
    spread,
    timed,
)
from trainers import copy_with_data, path_overrides

HEADER = ["run", "steps", "validation loss", "s", "CPU s", "times faster", "by CPU time"]
NANOGPT_STEPS = 2000
FLAGS = "--device=cpu --compile=False --eval_iters=20 --block_size=64 --batch_size=12 --dropout=0.0"
SHAPE = "--n_layer=4 --n_head=4 --n_embd=128 --log_interval=1"
PROBES = (40, 160)  # numbers of steps of the two short runs
SHARE = 0.98  # plan for this share of the time budget; the rest is a margin


@dataclass(frozen=True)
class Run:
    """A training process.

    Attributes:
        steps: Number of steps.
        val_loss: Loss in nats per character over the whole validation split.
        wall_s: Wall time of the process.
        cpu_s: CPU time of all its processes.
    """

    steps: int
    val_loss: float
    wall_s: float
    cpu_s: float


def nanogpt(copy: Path, steps: int, cores: int) -> Run:
    """Train nanoGPT with one thread for each core, and evaluate its checkpoint."""
    flags = [*FLAGS.split(), *SHAPE.split(), f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
    wall, cpu = timed(
        [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags], copy, cores
    )
    evaluate = [
        sys.executable,
        str(ROOT / "benchmarks" / "nanogpt_loss.py"),
        "out-shakespeare-char/ckpt.pt",
    ]
    stdout = subprocess.run(
        evaluate, cwd=copy, env=environment(1), capture_output=True, text=True, check=True
    ).stdout
    kept = json.loads(stdout.splitlines()[-1])
    return Run(kept["step"], kept["val_loss"], wall, cpu)


def ours(experiment: str, text: Path, cores: int, extra: list[str]) -> Run:
    """Train an experiment of ours with one process for each core, without any caches."""
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as directory:
        where = [*path_overrides(text, Path(directory)), "run.name=run"]
        extra = [f"ddp.nproc_per_node={cores}", *extra] if cores > 1 else extra
        command = [
            sys.executable,
            str(ROOT / "main.py"),
            f"experiment={experiment}",
            "trainer.device=cpu",
        ]
        wall, cpu = timed([*command, *where, *extra], Path(directory))
        result = json.loads((Path(directory) / "runs" / "run" / "result.json").read_text())
    return Run(result["step"], nats_per_character(result), wall, cpu)


def steps_that_fit(short: Run, longer: Run, budget_s: float) -> int:
    """Compute the number of steps that fit into a budget of CPU time.

    The CPU time is assumed to be a constant plus a cost per step, which two runs determine.

    Raises:
        SystemExit: The longer run did not take longer, or no step fits.
    """
    step_s = (longer.cpu_s - short.cpu_s) / (longer.steps - short.steps)
    steps = int((budget_s - short.cpu_s) / step_s) + short.steps if step_s > 0 else 0
    if steps < 1:
        sys.exit(f"no steps of {step_s:.4f} CPU s fit into {budget_s:.1f} s; give --long-steps")
    return steps


def summary(runs: list[Run], baseline: list[Run]) -> dict[str, Any]:
    figures: dict[str, Any] = {"steps": [run.steps for run in runs]}
    for key in ("val_loss", "wall_s", "cpu_s"):
        figures[key] = spread([getattr(run, key) for run in runs])
    for key in ("wall", "cpu"):
        mine, theirs = ([getattr(run, f"{key}_s") for run in side] for side in (runs, baseline))
        figures[f"{key}_ratio"] = compare(theirs, mine)  # speedup
    return figures


def readme(results: dict[str, Any]) -> list[tuple[str, str]]:
    cores = "one core" if results["cores"] == 1 else f"{results['cores']} cores"

    def describe(figures: dict[str, Any]) -> str:
        steps = " to ".join(
            f"{n:,}" for n in sorted({min(figures["steps"]), max(figures["steps"])})
        )
        return f"{cell(figures['val_loss'], '.3f')} in {steps} steps"

    theirs, fast = describe(results["nanogpt"]), results["fast"]
    what = (
        f"whole training on tinyshakespeare, {cores}: `{fast['experiment']}` (validation "
        f"loss {describe(fast)})"
    )
    times = (
        f"{cell(fast['wall_ratio'], '.1f')} times faster; by CPU time "
        f"{cell(fast['cpu_ratio'], '.1f')}"
    )
    rows = [(f"{what} against nanoGPT ({theirs})", times)]
    if long := results.get("long"):
        time, cpu = (1 / long[f"{clock}_ratio"]["median"] for clock in ("wall", "cpu"))
        times = f"{time:.2f} of nanoGPT's time, {cpu:.2f} of its CPU time"
        what = f"validation loss per character of `{long['experiment']}` in {times}, {cores}"
        rows.append((what, describe(long)))
    return rows


def command_line() -> argparse.Namespace:
    options = parser(__doc__, "time_to_loss")
    options.add_argument(
        "--nanogpt", type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"
    )
    options.add_argument(
        "--steps",
        type=int,
        default=NANOGPT_STEPS,
        help="number of nanoGPT's steps (default: %(default)s)",
    )
    options.add_argument(
        "--cores", type=int, default=1, help="number of cores to use (default: %(default)s)"
    )
    options.add_argument(
        "--fast",
        default="shakespeare_char_cpu_fast",
        metavar="NAME",
        help="experiment that reaches nanoGPT's loss sooner (default: %(default)s)",
    )
    options.add_argument(
        "--long",
        default="shakespeare_bpe_cpu",
        metavar="NAME",
        help="experiment that trains for nanoGPT's time (default: %(default)s)",
    )
    options.add_argument(
        "--long-steps",
        type=int,
        help="number of steps of --long, or 0 to skip it (default: as many as fit)",
    )
    options.add_argument(
        "--repetitions", type=int, default=3, help="runs of each (default: %(default)s)"
    )
    return options.parse_args()


def as_many_as_fit(experiment: str, text: Path, cores: int, budget: Run) -> int:
    probes = [ours(experiment, text, cores, [f"trainer.max_steps={n}"]) for n in PROBES]
    steps = steps_that_fit(probes[0], probes[1], SHARE * budget.cpu_s)
    log(f"{experiment}: {steps} steps fit")
    return steps


def seeded(experiment: str, text: Path, cores: int, *extra: str) -> Callable[[], Run]:
    """Make a function that trains with the next seed at each call: 1, 2, 3 and so on."""
    seeds = count(1)
    return lambda: ours(experiment, text, cores, [f"run.seed={next(seeds)}", *extra])


def main() -> None:
    chosen = command_line()
    text, cores = corpus_path(), chosen.cores
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as directory:
        copy = copy_with_data(chosen.nanogpt, text, Path(directory) / "nanogpt")
        candidates: dict[str, Callable[[], Run]] = {
            "nanogpt": partial(nanogpt, copy, chosen.steps, cores)
        }
        candidates["fast"] = seeded(chosen.fast, text, cores)
        if chosen.long_steps is None:
            chosen.long_steps = as_many_as_fit(chosen.long, text, cores, candidates["nanogpt"]())
        if chosen.long_steps:
            candidates["long"] = seeded(
                chosen.long, text, cores, f"trainer.max_steps={chosen.long_steps}"
            )
        runs = alternate("time to loss", candidates, chosen.repetitions)
    results = {name: summary(values, runs["nanogpt"]) for name, values in runs.items()}
    for name in results.keys() - {"nanogpt"}:
        results[name]["experiment"] = getattr(chosen, name)
    figures = {"cores": cores, **results}
    forms = {
        "val_loss": ".4f",
        "wall_s": ".1f",
        "cpu_s": ".1f",
        "wall_ratio": ".2f",
        "cpu_ratio": ".2f",
    }
    rows = [
        [name, str(result["steps"]), *(cell(result[key], form) for key, form in forms.items())]
        for name, result in results.items()
    ]
    report(chosen.out, figures, HEADER, rows, readme(figures))


if __name__ == "__main__":
    main()
