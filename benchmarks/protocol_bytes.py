"""Count the messages and bytes that each rank exchanges with the store and in JSON collectives.

One process plays all ranks, each in a thread, on 2 to 256 of them (tests/counting.py says what is
counted, and how). Figures of 1,024 ranks are reckoned: the simplest of constant, logarithmic,
linear, both, and quadratic in the ranks that is within 5% of what was counted on 8, 64 and 256; if
none grows so, four times the figure of 256, which is an upper bound of what grows less than the
ranks. `all` is the sum over all ranks, which the host of the store carries in the parts that use
the store.

    join                the handshake in the store; all ranks come at once
    join again          the same, with the keys of an earlier attempt in the store
    join, one late      the same as the first, but the last rank comes a second later
    heartbeats          a second of training: each watchdog writes and reads four times
    value of rank zero  run_on_rank_zero with a value of 20 kB
    all_gather          of a number of each rank
    start               collectives of a start, up to the model
    resume              the same from a snapshot whose state.json has 20 kB
    commit              a snapshot of 150 tensors, of which each rank writes its part

What torch itself exchanges to connect its process groups, and gradients, are not counted.

    python benchmarks/protocol_bytes.py
    python benchmarks/protocol_bytes.py --package OTHER --out before.json
    python benchmarks/protocol_bytes.py --before before.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, log, parser, report

RANKS = [2, 8, 64, 256]
FITTED = [8, 64, 256]
RECKONED = 1024
TOLERANCE = 0.05
FIGURES = {
    "zero_messages": "rank zero: messages",
    "zero_bytes": "bytes",
    "other_messages": "busiest other rank: messages",
    "other_bytes": "bytes",
    "mean_bytes": "mean of the others: bytes",
    "all_bytes": "all: bytes",
}
GROWTHS: dict[str, Callable[[float], list[float]]] = {
    "constant": lambda ranks: [1.0],
    "logarithmic": lambda ranks: [1.0, float(np.log2(ranks))],
    "linear": lambda ranks: [1.0, ranks],
    "logarithmic and linear": lambda ranks: [1.0, float(np.log2(ranks)), ranks],
    "quadratic": lambda ranks: [1.0, ranks, ranks**2],
}
Table = dict[str, dict[str, dict[str, Any]]]  # by part, ranks and figure


def count(world_size: int) -> dict[str, dict[str, int]]:
    """Return the figures of all parts on so many ranks."""
    import protocol_parts as parts  # imports the package, which --package chooses

    found = {}
    with tempfile.TemporaryDirectory(prefix="protocol-") as scratch:
        directory = Path(scratch)
        ranks = parts.Ranks(world_size, parts.configuration(directory, world_size))
        plays = {
            "join": partial(parts.join, world_size),
            "join again": partial(parts.join, world_size, attempts=2),
            "join, one late": partial(parts.join, world_size, parts.LATE_S),
            "heartbeats": partial(parts.heartbeats, ranks),
            "value of rank zero": partial(parts.rank_zero_value, ranks),
            "all_gather": partial(parts.small_values, ranks),
            "start": partial(parts.start, ranks),
            "resume": partial(parts.resume, ranks),
            "commit": partial(parts.commit, ranks, directory / "plain"),
        }
        for name, play in plays.items():
            began = time.perf_counter()
            found[name] = summarize(play())
            log(f"{world_size} ranks, {name}: {time.perf_counter() - began:.1f} s")
    return found


def summarize(counts: list[Any]) -> dict[str, int]:
    """Return the figures of a part.

    Args:
        counts: by rank.
    """
    zero, *others = counts
    return {
        "zero_messages": zero.messages,
        "zero_bytes": zero.bytes,
        "other_messages": max(other.messages for other in others),
        "other_bytes": max(other.bytes for other in others),
        "mean_bytes": round(sum(other.bytes for other in others) / len(others)),
        "all_bytes": sum(each.bytes for each in counts),
    }


def reckon(counted: Mapping[int, float]) -> tuple[int, str]:
    """Return a figure of RECKONED ranks, and how it grows.

    Args:
        counted: the figure by ranks.
    """
    values = np.array([counted[ranks] for ranks in FITTED])
    for growth, basis in GROWTHS.items():
        # Relative errors: else the largest would decide alone.
        rows = np.array([basis(ranks) for ranks in FITTED]) / values[:, None]
        factors = np.linalg.lstsq(rows, np.ones(len(FITTED)), rcond=None)[0]
        grows = (factors[1:] >= 0).all()
        if grows and np.abs(rows @ factors - 1).max() < TOLERANCE:
            return round(float(np.dot(basis(RECKONED), factors))), growth
    last = FITTED[-1]
    return round(counted[last] * RECKONED / last), "at most linear"


def with_reckoned(counted: dict[int, dict[str, dict[str, int]]]) -> Table:
    """Return the figures by part, with those of RECKONED ranks."""
    table: Table = {}
    for part in counted[RANKS[0]]:
        table[part] = {str(ranks): {**found[part]} for ranks, found in counted.items()}
        if not set(FITTED) <= counted.keys():
            continue
        reckoned: dict[str, Any] = {}
        for figure in FIGURES:
            by_ranks = {ranks: found[part][figure] for ranks, found in counted.items()}
            reckoned[figure], reckoned[f"{figure}_growth"] = reckon(by_ranks)
        # The sum may grow faster than any of its parts.
        reckoned["all_bytes"] = reckoned["zero_bytes"] + (RECKONED - 1) * reckoned["mean_bytes"]
        reckoned["all_bytes_growth"] = "the sum of the ranks"
        table[part][str(RECKONED)] = reckoned
    return table


def rows_of(table: Table, before: Table) -> list[list[str]]:
    """Return the rows of the printed table; a figure of `before` stands in front of an arrow."""
    rows = []
    for part, by_ranks in table.items():
        for ranks, found in by_ranks.items():
            earlier = before.get(part, {}).get(ranks, {})
            cells = [cell_of(found, earlier, figure) for figure in FIGURES]
            mark = " (reckoned)" if int(ranks) == RECKONED else ""
            rows.append([part, f"{int(ranks):,}{mark}", *cells])
    return rows


def cell_of(found: Mapping[str, Any], earlier: Mapping[str, Any], figure: str) -> str:
    if figure not in earlier:
        return f"{found[figure]:,}"
    return f"{earlier[figure]:,} -> {found[figure]:,}"


def readme(table: Table) -> list[tuple[str, str]]:
    rows = []
    for part, by_ranks in table.items():
        if "256" not in by_ranks:
            continue
        found = by_ranks["256"]
        figure = (
            f"{found['zero_bytes']:,} on rank zero, {found['mean_bytes']:,} on another on average, "
            f"{found['other_bytes']:,} at most"
        )
        rows.append((f"bytes of each of 256 ranks, sent and received: {part}", figure))
    return rows


def main() -> None:
    options = parser(__doc__, "protocol_bytes")
    options.add_argument(
        "--package", type=Path, default=ROOT, help="checkout to count (default: this one)"
    )
    options.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options.add_argument("--before", type=Path, help="JSON file of an earlier version, to compare")
    chosen = options.parse_args()
    package = chosen.package.resolve()
    # its helpers of the tests fit it; those that it lacks are of this checkout
    sys.path[:0] = [str(package), str(package / "tests")]
    sys.path.append(str(ROOT / "tests"))
    before = json.loads(chosen.before.read_text())["parts"] if chosen.before else {}
    table = with_reckoned({ranks: count(ranks) for ranks in chosen.ranks})
    header = ["part", "ranks", *FIGURES.values()]
    results = {"parts": table, "before": before}
    report(chosen.out, results, header, rows_of(table, before), readme(table))


if __name__ == "__main__":
    main()
