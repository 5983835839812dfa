"""Parts of the figures of a report, as plain data for plotly."""

from collections.abc import Mapping
from html import escape
from statistics import quantiles
from typing import Any

from mingpt_ddp.results.formats import cut
from mingpt_ddp.results.runs import number

DRAWN = 12  # parameters with a plot; the table has all
POINTS = 200  # of a curve
LONGEST = 40  # characters of a name or value in a plot
# best to worst, legible on white and on black
COLOURS = ["rgb(24,119,214)", "rgb(176,80,159)", "rgb(226,134,24)"]
INCOMPLETE = "rgb(138,147,158)"


def draw(
    figures: list[dict[str, Any]],
    traces: list[dict[str, Any]],
    layout: dict[str, Any],
    height: int,
    width: int = 0,
) -> str:
    """Add a figure and return its HTML element; "" if there are no traces."""
    if not traces:
        return ""
    figures.append({"data": traces, "layout": layout})
    return f'<div class="plot" style="height:{height}px;min-width:{width}px"></div>'


def thinned(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return steps and values of about POINTS points that can be drawn, the last one among them."""
    drawn = [(x, y) for x, y in points if number(x) is not None and number(y) is not None]
    kept = dict.fromkeys([*drawn[:: len(drawn) // POINTS + 1], *drawn[-1:]])
    return [x for x, _ in kept], [y for _, y in kept]


def label(text: str, longest: int = LONGEST) -> str:
    """Escape a text for plotly, which renders tags and entities in labels."""
    return escape(cut(text, longest), quote=False)


def tick_labels(labels: Mapping[float, str]) -> dict[str, Any]:
    return {"tickvals": [*labels], "ticktext": [*labels.values()]}


def highest(losses: list[float]) -> float:
    """Return the highest loss within three interquartile ranges above the third quartile."""
    if len(losses) < 4:
        return max(losses, default=0.0)
    first, _, third = quantiles(losses, n=4, method="inclusive")
    return max(loss for loss in losses if loss <= third + 3 * (third - first))


def loss_axis(losses: list[float], title: str) -> dict[str, Any]:
    low = min(losses, default=0.0)
    high = highest(losses)
    margin = 0.06 * (high - low) or 0.05 * abs(low) or 0.5
    return {"title": {"text": title}, "range": [low - margin, high + margin]}
