"""Measure the cost of `ddp.reduction=canonical`: the time of a step, compared to `fast`.

Both reductions run the user's command on local ranks with one thread each, in fp32, with the same
micro-batches. They alternate, and each pair of runs gives a ratio. If each rank has one
micro-batch, the canonical exchange sends as many bytes as a ring. If a rank has several, `fast`
first adds up their gradients, but canonical exchanges the gradients of each. `modern` uses Muon,
which orthogonalizes each matrix separately under canonical. On one rank, the ratio shows the cost
of this and of copying the gradients.

    python benchmarks/canonical.py
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import alternate, cell, compare, corpus_path, parser, report, spread
from stopwatch import pace
from trainers import MODERN, OURS, PLAIN, SETTINGS, ours

HEADER = ["case", "fast, ms", "canonical, ms", "times the time", "times the memory"]
REDUCTIONS = ("fast", "canonical")


@dataclass(frozen=True)
class Case:
    shape: str
    recipe: list[str]
    ranks: int
    micro_batches: int  # number in a step, over all ranks

    @property
    def name(self) -> str:
        model = "`modern` with Muon" if self.recipe is MODERN else "`gpt` with AdamW"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{model}, {self.shape}, {ranks}, {self.micro_batches} micro-batches a step"


CASES = (
    Case("small", PLAIN, 2, 2),
    Case("small", PLAIN, 2, 12),
    Case("small", PLAIN, 3, 3),
    Case("small", MODERN, 1, 1),
    Case("small", MODERN, 2, 2),
    Case("mid", PLAIN, 2, 2),
    Case("mid", PLAIN, 2, 16),
    Case("mid", MODERN, 2, 2),
)


def train(case: Case, reduction: str, text: Path, scratch: Path) -> tuple[float, float]:
    """Measure the wall time of a step in milliseconds, and the peak memory of all ranks in MB."""
    setting = SETTINGS[case.shape]
    command = ours(setting, text, scratch, [*case.recipe, "trainer.precision=fp32"])
    command += [f"ddp.reduction={reduction}", f"ddp.nproc_per_node={case.ranks}"]
    command += [f"trainer.micro_batch_size={setting.batch // case.micro_batches}"]
    taken = pace(command, scratch, OURS, setting.span)
    return 1e3 * taken.wall_s, taken.peak_mb


def main() -> None:
    options = parser(__doc__, "canonical")
    options.add_argument(
        "--cases", nargs="+", type=int, help="numbers of the cases, from 0 (default: all)"
    )
    options.add_argument(
        "--repetitions", type=int, default=3, help="runs of each reduction (default: %(default)s)"
    )
    chosen = options.parse_args()
    text = corpus_path()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="canonical-") as directory:
        for number in chosen.cases or range(len(CASES)):
            case = CASES[number]
            candidates = {
                name: partial(train, case, name, text, Path(directory)) for name in REDUCTIONS
            }
            taken = alternate(case.name, candidates, chosen.repetitions)
            figures: dict[str, Any] = {"case": case.name}
            for i, unit in enumerate(("ms", "mb")):
                fast, canonical = ([values[i] for values in taken[name]] for name in REDUCTIONS)
                figures[unit] = {"fast": spread(fast), "canonical": spread(canonical)}
                figures[unit]["ratio"] = compare(canonical, fast)
            results.append(figures)
    rows = []
    readme = []
    for result in results:
        times = [cell(result["ms"][name], ".1f") for name in REDUCTIONS]
        ratio = cell(result["ms"]["ratio"], ".2f")
        memory = cell(result["mb"]["ratio"], ".2f")
        rows.append([result["case"], *times, ratio, memory])
        what = f"a step with `ddp.reduction=canonical` against fast: {result['case']}"
        readme.append((what, f"{ratio} times the time, {memory} times the memory of all processes"))
    report(chosen.out, {"cases": results}, HEADER, rows, readme)


if __name__ == "__main__":
    main()
