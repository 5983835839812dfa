"""Measure whether what introductions to distributed training say about it is true.

A claim is true, false, or not measurable on this machine. Speeds are the median tokens/s of a run's
log, of runs that alternate: A, B, A, B ... A claim about speed is true if the median ratio exceeds
1 by more than TOLERANCE. Every rank has one CPU thread, so the machine needs two cores.

    python benchmarks/claims.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, alternate, cell, compare, environment, gpu, parser, report

TOLERANCE = 0.05
HEADER = ["claim", "verdict", "figures"]
TRAINING = [
    "trainer.device=cpu",
    "trainer.max_epochs=null",
    "trainer.eval_every=null",
    "snapshot.every_steps=null",
    "data.truncate=0.2",
    "trainer.log_every=5",
    "trainer.eval_steps=1",
    "trainer.max_steps=60",
]
SMALL = ["model=gpt_nano", "trainer.max_steps=300"]
LARGE = ["model=gpt_mini", "trainer.batch_size=16"]
GLOO = ["ddp.backend=gloo"]
MESSAGE, PIECES = 1 << 20, 256  # bytes of all pieces together

Claim = Callable[[int], tuple[bool, dict[str, Any], str]]  # repetitions in; verdict, figures, text


def result(*overrides: str, ranks: int = 1) -> tuple[dict[str, Any], list[float]]:
    """Train; return result.json and the tokens/s of each log step but the first two."""
    with tempfile.TemporaryDirectory(prefix="claims-") as scratch:
        words = [
            *TRAINING,
            *overrides,
            f"run.root={scratch}",
            "run.name=run",
            f"ddp.nproc_per_node={ranks}",
        ]
        command = [sys.executable, str(ROOT / "main.py"), *words]
        subprocess.run(
            command, check=True, cwd=scratch, env=environment(), stdout=subprocess.DEVNULL
        )
        lines = [
            json.loads(line)
            for line in Path(scratch, "run", "metrics.jsonl").read_text().splitlines()
        ]
        speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
        return json.loads(Path(scratch, "run", "result.json").read_text()), speeds[2:]


def speed(*overrides: str, ranks: int = 1) -> float:
    speeds = sorted(result(*overrides, ranks=ranks)[1])
    return speeds[len(speeds) // 2]


def faster(
    what: str, ours: Callable[[], float], theirs: Callable[[], float], repetitions: int
) -> dict[str, Any]:
    """Return the ratios of two speeds, measured in alternation."""
    values = alternate(what, {"first": ours, "second": theirs}, repetitions)
    return compare(values["first"], values["second"])


def is_faster(ratio: dict[str, Any]) -> bool:
    return bool(ratio["median"] > 1 + TOLERANCE)


def few_large_messages(repetitions: int) -> tuple[bool, dict[str, Any], str]:
    ratios = []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="claims-") as scratch:
            out = Path(scratch, "collectives.json")
            sizes = [
                f"min_bytes={MESSAGE // PIECES}",
                f"max_bytes={MESSAGE}",
                f"factor={PIECES}",
                f"json={out}",
            ]
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node=2",
            ]
            command = [
                *launcher,
                "examples/collectives.py",
                "all_reduce",
                "backend=gloo",
                "device=cpu",
                *sizes,
            ]
            subprocess.run(
                command, check=True, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
            )
            small, large = (row["latency_s"] for row in json.loads(out.read_text())["results"])
        ratios.append(PIECES * small / large)
    ratio = compare(ratios, [1.0] * repetitions)
    text = (
        f"{PIECES} messages of {MESSAGE // PIECES} bytes take {cell(ratio, '.1f')} times "
        "as long as one of 1 MiB"
    )
    return is_faster(ratio), {"ratio": ratio}, text


def small_models(repetitions: int) -> tuple[bool, dict[str, Any], str]:
    figures = {}
    for name, model in (("small", SMALL), ("large", LARGE)):
        settings = ([*model, *GLOO, "trainer.precision=bf16"], [*model, "trainer.precision=fp32"])
        measures = (partial(speed, *settings[0], ranks=2), partial(speed, *settings[1]))
        figures[name] = faster(f"DDP and AMP, {name}", *measures, repetitions)
    text = ", ".join(f"{name}: {cell(ratio, '.2f')}" for name, ratio in figures.items())
    verdict = not is_faster(figures["small"]) and is_faster(figures["large"])
    return (
        verdict,
        figures,
        f"2 ranks in bf16 over 1 in fp32, times the tokens/s of gpt_nano and gpt_mini: {text}",
    )


def larger_batch(repetitions: int) -> tuple[bool, dict[str, Any], str]:
    settings = [*SMALL, "trainer.max_steps=60", "trainer.precision=fp32", "trainer.eval_steps=null"]
    two, _ = result(*settings, "trainer.batch_size_per_rank=6", ranks=2)
    one, _ = result(*settings, "trainer.batch_size=12")
    difference = abs(two["val_loss"] - one["val_loss"])
    text = (
        f"val_loss after 60 steps: {two['val_loss']:.6f} on 2 ranks of 6, "
        f"{one['val_loss']:.6f} on 1 of 12"
    )
    return difference < 1e-5, {"difference": difference}, text


CLAIMS: dict[str, Claim | None] = {  # None: it needs two GPUs
    "few large all-reduces beat many small ones": few_large_messages,
    "small models gain nothing from DDP with 16-bit products, larger ones do": small_models,
    "more ranks act as a larger batch": larger_batch,
    "NCCL beats gloo between GPUs": None,
    "one process per device (DDP) beats threads in one (DataParallel)": None,
    "page-locked memory (pin_memory) speeds up the copy to a GPU": None,
}


def main() -> None:
    made = parser(__doc__, "claims")
    made.add_argument("--repetitions", type=int, default=5)
    args = made.parse_args()
    found: dict[str, Any] = {}
    rows = []
    for claim, measure in CLAIMS.items():
        if measure is None:
            reason = "benchmarks/gpu.py compares speeds on one GPU" if gpu() else "no GPU"
            verdict, text = "not measurable here", reason
        else:
            is_true, figures, text = measure(args.repetitions)
            verdict = "true" if is_true else "false"
            found[claim] = {"verdict": verdict, **figures}
        rows.append([claim, verdict, text])
    report(
        args.out,
        {"claims": found},
        HEADER,
        rows,
        readme=[(claim, f"{v}: {text}") for claim, v, text in rows],
    )


if __name__ == "__main__":
    main()
