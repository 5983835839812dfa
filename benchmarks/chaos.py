"""Inject a given number of random faults into one run, and compare its bits to an undisturbed run.

The run keeps its snapshots on a SeaweedFS server behind a fault proxy. Its directory is on a
separate disk. Processes get SIGKILL, SIGSTOP, SIGTERM or SIGUSR1. The disk becomes full or
read-only. The clock jumps. The server is killed and restarted. The proxy injects errors 503,
resets, stalls, late responses and lost ones. Every start draws one to three ranks and one of two
launchers. With ddp.reduction=canonical, the SHA-256 of all tensors of the model and the optimizer
must equal the one of an undisturbed run on one rank. Any violation ends the script with an error.

With --keep the count of faults survives Ctrl-C, SIGTERM and SIGKILL, and the same command
continues. If --faults is smaller than the number already reached, the script only completes the
run, compares it and reports.

The script needs the test extra: pip install -e .[test]. Without the right to mount a file system it
leaves out the faults of the disk, and says so.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, log, parser, report

sys.path.insert(0, str(ROOT / "tests"))  # for the chaos engine of the tests

from chaos import Chaos
from chaos_result import check_result, undisturbed
from s3_server import SeaweedServer


def main() -> None:
    args = parser(__doc__, "chaos")
    args.add_argument(
        "--faults", type=int, default=2000, help="total number to reach (default: %(default)s)"
    )
    args.add_argument("--seed", type=int, default=1)
    args.add_argument(
        "--keep", type=Path, help="directory that keeps the run, to continue it later"
    )
    given = args.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it logs every restart
    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        home = (given.keep or Path(directory)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        server = SeaweedServer(home / "s3")
        try:
            server.start()
            result = run(home, server, given.faults, given.seed)
        except KeyboardInterrupt:
            sys.exit("interrupted; with --keep the same command continues the run")
        finally:
            server.kill()
    rows = [[key, str(value)] for key, value in result.items() if not isinstance(value, dict)]
    for part in ("faults", "lost", "starts"):
        rows += [[f"{part}: {kind}", describe(each)] for kind, each in result[part].items()]
    report(given.out, {"run": result}, ["", ""], rows, readme(result))


def interrupt(*_: Any) -> None:
    """End the script as Ctrl-C does."""
    raise KeyboardInterrupt


def run(home: Path, server: SeaweedServer, faults: int, seed: int) -> dict[str, Any]:
    """Inject faults until their number is reached, then compare the run to an undisturbed one."""
    os.environ.update(server.environment())
    bucket = "runs"
    if bucket not in server.buckets():
        server.make_bucket(bucket)
    chaos = Chaos(home, server, bucket, seed)
    chaos.on_fault = lambda: log(
        f"{chaos.report.total} faults, {chaos.report.seconds:.0f} s, "
        f"step {chaos.checker.last_step}, last: {chaos.checker.cause}"
    )
    try:
        survived = chaos.inject_up_to(faults)
        log(f"training {survived.steps} steps without faults on one rank")
        sha256 = check_result(chaos, undisturbed(home / "undisturbed", survived.steps))
    finally:
        chaos.disk.unmount()
    lost = chaos.checker.lost
    return {
        "seed": seed,
        "faults in all": survived.total,
        "minutes": round(survived.seconds / 60, 1),
        "faults per minute": round(60 * survived.total / survived.seconds, 1),
        "sessions": survived.sessions,
        "starts of the run": survived.launches,
        "ended attempts": sum(map(len, lost.values())),
        "steps": survived.steps,
        "steps trained again": sum(map(sum, lost.values())),
        "steps without a line, the disk was full": len(chaos.checker.may_be_missing()),
        "snapshots committed": chaos.checker.commits,
        "saves that failed, training went on": chaos.checker.failed_saves,
        "gave up: the store was away": survived.gave_up,
        "SHA-256 of the model, as undisturbed on one rank": sha256,
        "faults": dict(sorted(survived.faults.items())),
        "lost": {kind: summary(steps) for kind, steps in sorted(lost.items())},
        "starts": dict(sorted(survived.ranks.items())),
    }


def readme(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Write the row for docs/benchmarks.md."""
    lost = result["lost"]
    preempted = [lost[kind]["most"] for kind in ("SIGTERM", "SIGUSR1") if kind in lost]
    what = (
        f"{result['faults in all']:,} faults in {result['minutes']:.0f} minutes, 1 to 3 ranks on "
        f"S3, {result['ended attempts']} ended attempts, against one rank without faults"
    )
    same = "the same SHA-256 of the model"
    most = max(preempted, default=0)
    return [(what, f"{same}; a preemption lost at most {most} steps")]


def summary(steps: list[int]) -> dict[str, float]:
    """Summarize the numbers of steps that were lost."""
    return {"times": len(steps), "most": max(steps), "mean": round(sum(steps) / len(steps), 1)}


def describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']} steps on average, at most {value['most']}, {value['times']} times"
    return str(value)


if __name__ == "__main__":
    main()
