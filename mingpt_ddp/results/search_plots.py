"""The figures of a search: its Pareto front, and the importance of its parameters."""

from typing import Any

from mingpt_ddp.results.figures import COLOURS, DRAWN, INCOMPLETE, draw, label, tick_labels
from mingpt_ddp.results.formats import short_names
from mingpt_ddp.results.front import Front, costs_of, pareto_front


def draw_front(figures: list[dict[str, Any]], front: Front, hovers: list[str]) -> str:
    """Draw the groups by their first two objectives, and the front of these two.

    Args:
        hovers: what the point of each group shows.
    """
    across, up = front.goals[:2]
    points = {}
    for index, (x, y, *_) in enumerate(front.values):
        if x is not None and y is not None:
            points[index] = (x, y)
    costs = {index: costs_of(front.goals[:2], [*at]) for index, at in points.items()}
    steps = sorted(points[index] for index in pareto_front(costs))
    members = [index in front.members for index in points]
    traces: list[dict[str, Any]] = [
        {
            "mode": "lines",
            "x": [x for x, _ in steps],
            "y": [y for _, y in steps],
            # the edge of what is not better than the front in both objectives
            "line": {
                "color": COLOURS[0],
                "width": 1.5,
                "shape": "vh" if across.maximize else "hv",
            },
            "hoverinfo": "skip",
        },
        {
            "mode": "markers",
            "cliponaxis": False,
            "x": [x for x, _ in points.values()],
            "y": [y for _, y in points.values()],
            "text": [hovers[index] for index in points],
            "marker": {
                "color": [COLOURS[0] if member else INCOMPLETE for member in members],
                "size": [11 if member else 8 for member in members],
            },
        },
    ]
    layout = {}
    for axis, goal in (("xaxis", across), ("yaxis", up)):
        layout[axis] = {"title": {"text": f"{label(goal.name)}, {goal.direction}"}}
    return draw(figures, traces if points else [], layout, 340)


def draw_importance(figures: list[dict[str, Any]], importance: dict[str, float]) -> str:
    """Draw a bar for each parameter, the most important on top."""
    shares = [*importance.items()][:DRAWN][::-1]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [share for _, share in shares],
        "y": [*range(len(shares))],
        "marker": {"color": COLOURS[0]},
        "hovertemplate": "%{x:.2f}<extra></extra>",
    }
    short = short_names([*importance])
    names = dict[float, str]()
    for index, (key, _) in enumerate(shares):
        names[index] = label(short[key], 18)
    layout = {"xaxis": {"range": [0, 1]}, "yaxis": tick_labels(names), "bargap": 0.4}
    return draw(figures, [trace] if shares else [], layout, 80 + 34 * len(shares))
