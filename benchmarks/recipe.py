"""Measure the validation loss of the CPU recipes over several seeds.

Each seed is one run of the user's command, on two ranks with one thread each, in its own directory:

    torchrun --standalone --nproc_per_node=2 main.py experiment=NAME run.seed=SEED

The figure is the loss in its result.json, over the whole validation split at the end. It is
converted to nats per character, for any tokenizer. The exit code is 1 if the mean over the seeds is
above the experiment's limit. Recipes were tuned on a part of the training text, with other seeds.
For experiments in ENSEMBLE_LIMITS, the ensemble of all seeds has a limit of its own.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/recipe.py
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from common import ROOT, corpus_path, environment, log, nats_per_character, parser, report

RANKS = 2
# Limits of the mean loss in nats per character.
LIMITS = {
    "shakespeare_char_cpu": 1.92,
    "shakespeare_char_cpu_fast": 1.88,
    "shakespeare_char_cpu_long": 1.50,
    "shakespeare_bpe_cpu": 1.45,
}
# Limits of the ensemble's loss, which is computed from the mean of the seeds' probabilities.
ENSEMBLE_LIMITS = {"shakespeare_char_cpu_long": 1.47, "shakespeare_bpe_cpu": 1.43}
HEADER = [
    "experiment",
    "seed",
    "steps",
    "validation loss, nats/character",
    "bits/character",
    "minutes",
]


def train(experiment: str, seed: int, root: Path) -> dict[str, Any]:
    """Train to the end, and return the values of result.json."""
    name = f"{experiment}-{seed}"
    overrides = [
        f"experiment={experiment}",
        f"run.seed={seed}",
        f"run.name={name}",
        f"run.root='{root}'",
        f"data.path='{corpus_path()}'",
        f"data.cache_dir='{root / 'cache'}'",
        "trainer.device=cpu",
    ]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={RANKS}",
    ]
    command = [*torchrun, str(ROOT / "main.py"), *overrides]
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    tail: list[str] = []
    for line in process.stdout:
        tail = [*tail[-20:], line]
        if "validation loss" in line:
            log(f"{experiment}, seed {seed}: {line.strip()}")
    if process.wait() != 0:
        sys.exit(f"seed {seed} failed:\n{''.join(tail)}")
    result: dict[str, Any] = json.loads((root / name / "result.json").read_text())
    return result


def ensemble_loss(experiment: str, seeds: range, root: Path) -> float:
    """Compute the loss of the seeds' mean probabilities, over the whole validation split."""
    import numpy as np
    import torch

    from mingpt_ddp import load
    from mingpt_ddp.data.dataloader import TokenSplit

    runs = [load(root / f"{experiment}-{seed}") for seed in seeds]
    tokenizer = runs[0].tokenizer
    data = runs[0].config["data"]
    tokens = np.array(tokenizer.encode(corpus_path().read_text()))
    validation = tokens[int(len(tokens) * data["train_split"]) :]
    split = TokenSplit(validation, data["block_size"], torch.device("cpu"))
    nats = 0.0
    with torch.no_grad():
        for x, y in split.batches(0, 1):  # each (B, T)
            logs = torch.stack([run.model(x).log_softmax(dim=-1) for run in runs])
            mean = logs.logsumexp(dim=0) - math.log(len(runs))  # (B, T, V)
            nats -= float(mean.gather(-1, y[..., None]).double().sum())
    # The first token is not a target, so its characters do not count.
    loss = nats / len(tokenizer.decode(validation[1:].tolist()))
    log(f"{experiment}, ensemble of {len(runs)} seeds: validation loss {loss:.4f}")
    return loss


def main() -> None:
    options = parser(__doc__, "recipe")
    options.add_argument("--experiments", nargs="+", choices=LIMITS, default=list(LIMITS))
    options.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="number of seeds (default: %(default)s)",
    )
    options.add_argument(
        "--first-seed", type=int, default=101, help="first of the seeds (default: %(default)s)"
    )
    options.add_argument(
        "--root", type=Path, help="keep the runs in this directory (default: a temporary one)"
    )
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="recipe-") as scratch:
        root = (chosen.root or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        results = {
            name: summary([{"seed": n, **train(name, n, root)} for n in seeds])
            for name in chosen.experiments
        }
        for name in ENSEMBLE_LIMITS.keys() & results.keys() if len(seeds) > 1 else ():
            results[name]["ensemble"] = ensemble_loss(name, seeds, root)
    rows: list[list[str]] = []
    for name, found in results.items():
        for run in found["runs"]:
            losses = (nats_per_character(run), run["bits_per_char"])
            rows.append(
                [
                    name,
                    str(run["seed"]),
                    f"{run['step']:,}",
                    *(f"{loss:.4f}" for loss in losses),
                    minutes(run),
                ]
            )
        rows.append(
            [
                name,
                "mean",
                "",
                f"{found['mean']:.4f} ({found['low']:.4f} .. {found['high']:.4f})",
                "",
                "",
            ]
        )
        if "ensemble" in found:
            rows.append(
                [
                    name,
                    "ensemble",
                    "",
                    f"{found['ensemble']:.4f}",
                    f"{found['ensemble'] / math.log(2):.4f}",
                    "",
                ]
            )
    report(
        chosen.out,
        {"ranks": RANKS, "limits": LIMITS, "experiments": results},
        HEADER,
        rows,
        readme(results),
    )
    missed = [
        f"{name} {found['mean']:.4f}"
        for name, found in results.items()
        if found["mean"] > LIMITS[name]
    ]
    ensembles = {name: found["ensemble"] for name, found in results.items() if "ensemble" in found}
    missed += [
        f"{name}, ensemble {loss:.4f}"
        for name, loss in ensembles.items()
        if loss > ENSEMBLE_LIMITS[name]
    ]
    if missed:
        sys.exit(f"above the limit: {', '.join(missed)}")


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [nats_per_character(run) for run in runs]
    return {"mean": mean(losses), "low": min(losses), "high": max(losses), "runs": runs}


def readme(results: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            f"`experiment={name}`, {found['runs'][0]['step']:,} steps on {RANKS} ranks: "
            f"validation loss over the whole split, mean of {len(found['runs'])} seeds",
            f"{found['mean']:.3f} ({found['low']:.3f} .. {found['high']:.3f}) nats per character"
            + (f"; their ensemble {found['ensemble']:.3f}" if "ensemble" in found else ""),
        )
        for name, found in results.items()
    ]


def minutes(run: dict[str, Any]) -> str:
    return f"{run['wall_seconds'] / 60:.1f}"


if __name__ == "__main__":
    main()
