"""Inject seeded random faults into a long run, and count what it survives and what it loses.

The run keeps its snapshots on a SeaweedFS server behind a fault proxy. Processes get SIGKILL,
SIGSTOP, SIGTERM or SIGUSR1; the server is killed and restarted; the proxy injects errors 503,
resets, stalls and lost responses. With a fixed world size the weights must equal those of an
undisturbed run, byte for byte; with a varying one, the validation loss within 0.0001. Every step
must be in the final history exactly once. Any violation ends the script with an error.

Needs the test extra: pip install -e .[test].
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, log, parser, report

sys.path.insert(0, str(ROOT / "tests"))  # the chaos engine of the tests

from chaos import Chaos, logged_steps, undisturbed
from s3_server import SeaweedServer

from mingpt_ddp.storage.urls import open_storage


def main() -> None:
    args = parser(__doc__, "chaos")
    args.add_argument(
        "--minutes", type=float, default=30, help="of faults, per variant (default: %(default)s)"
    )
    args.add_argument(
        "--ranks",
        nargs="+",
        default=["2", "1,2,3"],
        help="a variant each: 2, or 1,2,3 to choose from",
    )
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--keep", type=Path, help="directory for logs and data; deleted by default")
    given = args.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it logs every restart
    results = []
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            home = (given.keep or Path(directory)) / f"ranks-{ranks.replace(',', '-')}"
            results.append(
                run_variant(home, given.minutes, tuple(map(int, ranks.split(","))), given.seed)
            )
            log(json.dumps(results[-1], indent=1))
    rows = [
        [key, *(str(result[key]) for result in results)]
        for key in results[0]
        if key not in ("faults", "lost")
    ]
    for part in ("faults", "lost"):
        for kind in sorted({kind for result in results for kind in result[part]}):
            rows.append(
                [
                    f"{part}: {kind}",
                    *(format_value(result[part].get(kind, 0)) for result in results),
                ]
            )
    report(
        given.out,
        {"runs": results},
        ["", *(f"ranks {ranks}" for ranks in given.ranks)],
        rows,
        readme(results[0]),
    )


def readme(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the row of the first variant."""
    what = f"{run['minutes']} minutes of chaos, {run['ranks']} ranks on S3"
    same = (
        "byte-identical"
        if run["byte-identical"]
        else f"loss within {run['difference of validation losses']:.1g}"
    )
    lost = max(
        (run["lost"][kind]["most"] for kind in ("SIGTERM", "SIGUSR1") if kind in run["lost"]),
        default=0,
    )
    preempted = f"a preemption lost at most {lost} steps" if lost else "preemptions lost 0 steps"
    faults = f"{run['faults in all']} faults, {run['ended attempts']} ended attempts"
    return [(f"{what}: {faults}", f"{same}; {preempted}")]


def run_variant(home: Path, minutes: float, ranks: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Run one variant; exit if a check fails."""
    (home / "undisturbed").mkdir(parents=True)
    server = SeaweedServer(home / "s3")
    try:
        server.start()
        chaos = Chaos(home, server, server.make_bucket("runs"), seed, ranks)
        survived = chaos.go(60 * minutes)
        log("repeating the run without faults")
        reference = undisturbed(home / "undisturbed", survived.steps, max(ranks))
        os.environ.update(server.environment())
        model = f"step_{survived.steps:08d}/model.safetensors"
        same = open_storage(chaos.url).read(model) == (reference / "snapshots" / model).read_bytes()
    finally:
        server.kill()
    losses = [
        json.loads((run / "result.json").read_text())["val_loss"] for run in (chaos.run, reference)
    ]
    if (len(ranks) == 1 and not same) or abs(losses[0] - losses[1]) > 1e-4:
        sys.exit(
            "the weights differ from those of an undisturbed run: validation loss "
            f"{losses[0]} and {losses[1]}"
        )
    if logged_steps(chaos.run, 0) != list(range(1, survived.steps + 1)):
        sys.exit("TensorBoard shows a step twice or not at all")
    lost = {kind: summary(steps) for kind, steps in survived.lost.items()}
    return {
        "ranks": ",".join(map(str, ranks)),
        "seed": seed,
        "minutes": round(survived.seconds / 60, 1),
        "steps": survived.steps,
        "attempts": survived.attempts,
        "faults in all": sum(survived.faults.values()),
        "ended attempts": sum(len(steps) for steps in survived.lost.values()),
        "steps trained again": sum(sum(steps) for steps in survived.lost.values()),
        "snapshots committed": survived.committed,
        "saves that failed, training went on": survived.failed_saves,
        "gave up: the store was away": len(survived.gave_up),
        "byte-identical": same,
        "difference of validation losses": abs(losses[0] - losses[1]),
        "faults": survived.faults,
        "lost": lost,
    }


def summary(steps: list[int]) -> dict[str, float]:
    return {"times": len(steps), "most": max(steps), "mean": round(sum(steps) / len(steps), 1)}


def format_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']} steps on average, at most {value['most']}, {value['times']} times"
    return str(value)


if __name__ == "__main__":
    main()
