"""Does the CPU recipe learn? The validation loss of `experiment=shakespeare_char_cpu` over several seeds.

Each seed is one run of the program as its users start it, on two ranks with one thread each, in a directory of its
own:

    torchrun --standalone --nproc_per_node=2 main.py experiment=shakespeare_char_cpu run.seed=SEED

The figure is `val_loss` of its result.json: nats per character over the whole validation split, after 2,000 steps.
The exit code is 1 if the mean over the seeds is above the limit.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/recipe.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from common import ROOT, corpus_path, environment, parser, report, say

RANKS = 2
LIMIT = 1.92  # nats per character
HEADER = ["seed", "steps", "validation loss, nats/character", "bits/character", "minutes"]


def train(seed: int, root: Path) -> dict[str, Any]:
    """One run to its end; what it wrote to result.json."""
    name = f"seed-{seed}"
    overrides = ["experiment=shakespeare_char_cpu", f"run.seed={seed}", f"run.name={name}", f"run.root='{root}'"]
    overrides += [f"data.path='{corpus_path()}'", f"data.cache_dir='{root / 'cache'}'", "trainer.device=cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    command = [*torchrun, str(ROOT / "main.py"), *overrides]
    process = subprocess.Popen(
        command, cwd=root, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    tail: list[str] = []
    for line in process.stdout:
        tail = [*tail[-20:], line]
        if "validation loss" in line:
            say(f"seed {seed}: {line.strip()}")
    if process.wait() != 0:
        sys.exit(f"seed {seed} failed:\n{''.join(tail)}")
    result: dict[str, Any] = json.loads((root / name / "result.json").read_text())
    return result


def main() -> None:
    options = parser(__doc__, "recipe")
    options.add_argument("--seeds", type=int, default=3, help="how many: 1, 2, 3 ... (default: %(default)s)")
    options.add_argument("--limit", type=float, default=LIMIT, help="of the mean loss (default: %(default)s)")
    options.add_argument("--root", type=Path, help="keep the runs in this directory (default: a temporary one)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="recipe-") as scratch:
        root = (chosen.root or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        runs = {seed: train(seed, root) for seed in range(1, chosen.seeds + 1)}
    losses = [run["val_loss"] for run in runs.values()]
    average, low, high = mean(losses), min(losses), max(losses)
    rows = [
        [str(seed), f"{run['step']:,}", *(f"{run[key]:.4f}" for key in ("val_loss", "bits_per_char")), minutes(run)]
        for seed, run in runs.items()
    ]
    rows.append(["mean", "", f"{average:.4f} ({low:.4f} .. {high:.4f})", "", ""])
    figures = {"mean_val_loss": average, "low": low, "high": high, "limit": chosen.limit, "ranks": RANKS}
    results = {**figures, "runs": [{"seed": seed, **run} for seed, run in runs.items()]}
    report(chosen.out, results, HEADER, rows, readme(results))
    if average > chosen.limit:
        sys.exit(f"the mean validation loss {average:.4f} is above {chosen.limit}")


def readme(results: dict[str, Any]) -> list[tuple[str, str]]:
    what = f"`experiment=shakespeare_char_cpu`, {results['ranks']} ranks: validation loss over the whole split"
    figure = f"{results['mean_val_loss']:.3f} ({results['low']:.3f} .. {results['high']:.3f}) nats"
    return [(f"{what}, mean of {len(results['runs'])} seeds", figure)]


def minutes(run: dict[str, Any]) -> str:
    return f"{run['wall_seconds'] / 60:.1f}"


if __name__ == "__main__":
    main()
