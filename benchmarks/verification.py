"""What `trainer.verify_every` costs: the time of a comparison of two ranks against a step.

Runs that compare after every step alternate with runs that never do, one pair after the other. The
difference is the time of a comparison; at N=100 a hundredth of it falls on a step.

    python benchmarks/verification.py
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import alternate, cell, corpus_path, parser, report, spread
from stopwatch import pace
from trainers import MODERN, OURS, PLAIN, SETTINGS, ours

HEADER = ["case", "step, ms", "comparison, ms", "share at N=100"]
EVERY = (0, 1)
CASES = {
    "`gpt` with AdamW, small": ("small", PLAIN),
    "`modern` with Muon, small": ("small", MODERN),
    "`gpt` with AdamW, mid": ("mid", PLAIN),
}


def train(shape: str, recipe: list[str], every: int, text: Path, scratch: Path) -> float:
    """Return the milliseconds of a step by the clock, on two ranks."""
    setting = SETTINGS[shape]
    command = ours(setting, text, scratch, [*recipe, "trainer.precision=fp32"])
    command += ["ddp.nproc_per_node=2", f"trainer.verify_every={every}"]
    return 1e3 * pace(command, scratch, OURS, setting.span).wall_s


def main() -> None:
    options = parser(__doc__, "verification")
    options.add_argument(
        "--repetitions", type=int, default=3, help="of each (default: %(default)s)"
    )
    chosen = options.parse_args()
    text = corpus_path()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="verification-") as directory:
        for name, (shape, recipe) in CASES.items():
            candidates = {
                str(every): partial(train, shape, recipe, every, text, Path(directory))
                for every in EVERY
            }
            taken = alternate(name, candidates, chosen.repetitions)
            pairs = list(zip(taken["0"], taken["1"], strict=True))
            results.append(
                {
                    "case": name,
                    "step_ms": spread(taken["0"]),
                    "comparison_ms": spread([after - before for before, after in pairs]),
                    "share": spread([(after - before) / before / 100 for before, after in pairs]),
                }
            )
    rows = []
    readme = []
    for result in results:
        share = cell(result["share"], ".2%")
        times = [cell(result[key], ".1f") for key in ("step_ms", "comparison_ms")]
        rows.append([result["case"], *times, share])
        what = f"`trainer.verify_every=100`, {result['case']}, 2 ranks"
        readme.append((what, f"{share} of a step's time"))
    report(chosen.out, {"cases": results}, HEADER, rows, readme)


if __name__ == "__main__":
    main()
