"""The spread of replicates in a figure: bands around curves, and error bars."""

from typing import Any

from mingpt_ddp.results.figures import INCOMPLETE, thinned
from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.intervals import Estimate, estimate
from mingpt_ddp.results.runs import number

Curve = list[tuple[int, Estimate]]  # over the steps


def mean_curve(group: Group, key: str) -> Curve:
    """Return a measurement over the steps that all seeds have, at about POINTS of them."""
    found = []
    for job in group.samples:
        points = {x: y for x, y in job.history.series(key) if number(y) is not None}
        if points:
            found.append(points)
    if not found:
        return []
    common = [(step, 0.0) for step in found[0] if all(step in points for points in found)]
    steps, _ = thinned(common)
    return [(step, estimate([points[step] for points in found])) for step in steps]


def band(curve: Curve, colour: str) -> dict[str, Any]:
    """Fill the interval of a curve."""
    steps = [step for step, _ in curve]
    means = [found.mean for _, found in curve]
    halves = [half_width(found) for _, found in curve]
    above = [mean + half for mean, half in zip(means, halves, strict=True)]
    below = [mean - half for mean, half in zip(means, halves, strict=True)]
    return {
        "mode": "none",
        "x": [*steps, *steps[::-1]],
        "y": [*above, *below[::-1]],
        "fill": "toself",
        "fillcolor": colour.replace("rgb(", "rgba(").replace(")", ",0.16)"),
        "hoverinfo": "skip",
    }


def error_bars(found: list[Estimate], y: list[float], shown_range: list[float]) -> dict[str, Any]:
    """Return the intervals of the points, cut at the ends of the axis."""
    low, high = shown_range
    above = []
    below = []
    for each, at in zip(found, y, strict=True):
        half = half_width(each) if each.mean == at else 0.0  # none of a triangle at the edge
        above.append(min(half, high - at))
        below.append(min(half, at - low))
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {**bars, "color": INCOMPLETE, "thickness": 1.5, "width": 4}


def half_width(found: Estimate) -> float:
    """Return half the width of the interval; 0.0 of one value, which has none."""
    return found.half_width or 0.0
