"""TextIteratorIO of HTML and SVG, escaped: names and values are data, whatever they look like."""

from __future__ import annotations

import html
from collections.abc import Iterable

from mingpt_ddp.errors import printable
from mingpt_ddp.sweeps.scales import Scale

ROOM = 44  # pixels left of a plot, for the labels of its vertical axis


class Markup(str):
    """Text that is markup already."""


def escaped(text: object) -> Markup:
    if isinstance(text, Markup):
        return text
    encoded = printable(str(text)).encode(errors="backslashreplace").decode()  # names of files may hold any bytes
    return Markup(html.escape(encoded))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; `class_` is class, `stroke_width` is stroke-width, and what is None is left out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_rounded(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Markup:
    return Markup("".join(escaped(child) for child in children))


def _rounded(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def text(x: float, y: float, content: object, anchor: str = "middle", class_: str = "tick") -> Markup:
    return tag("text", content, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def path(points: Iterable[tuple[float, float]], **attributes: object) -> Markup:
    words = (f"{_rounded(float(x))},{_rounded(float(y))}" for x, y in points)
    return tag("path", d="M" + "L".join(words), **attributes)


def frame(x: Scale, y: Scale, x_title: object, y_title: object) -> Markup:
    """Axes with ticks below and to the left, and few lines across."""
    parts: list[Markup] = []
    for tick in y.ticks:
        parts += [line(x.start, tick.at, x.end, tick.at, "grid"), text(x.start - 7, tick.at + 4, tick.label, "end")]
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    for tick in x.ticks:
        parts += [line(tick.at, y.start, tick.at, y.start + 4, "axis"), text(tick.at, y.start + 17, tick.label)]
    parts.append(text((x.start + x.end) / 2, y.start + 34, x_title, class_="title"))
    parts.append(text(x.start - ROOM + 2, y.end - 12, y_title, "start", class_="title"))
    return joined(parts)


def picture(width: int, height: int, label: str, *content: object, class_: str) -> Markup:
    """A drawing of this many pixels, described by `label` to those who cannot see it."""
    return tag(
        "svg",
        *content,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        class_=class_,
    )
