"""From values to places on an axis, and which of them to write there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mingpt_ddp.sweeps.values import Value, brief, cut_inside, identity, is_number, order, scientific, shown

CHARACTER = 6.6  # pixels: the width of a character of a tick's label, rather too much
LINE = 16  # pixels between labels one below the other
LONGEST_LABEL = 16  # characters


@dataclass(frozen=True)
class Tick:
    at: float  # pixels
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis from pixel `start` to pixel `end`, which may be the smaller one."""

    place: Callable[[Value], float]
    ticks: list[Tick]
    start: float
    end: float

    def at(self, value: Value) -> float:
        """Pixels, never beyond the ends."""
        low, high = sorted((self.start, self.end))
        return min(max(self.place(value), low), high)

    def holds(self, value: float) -> bool:
        """Whether the value lies between the ends."""
        return abs(self.at(value) - self.place(value)) < 1e-6


def of_values(values: Iterable[Value], start: float, end: float, upright: bool = False) -> Scale:
    """For a parameter: numbers in their proportions, by their logarithms where they span decades, else one by one.

    Args:
        upright: the axis is vertical, labels stand above each other.
    """
    distinct = sorted({identity(value): value for value in values}.values(), key=order)
    numbers = [float(value) for value in distinct if is_number(value) and value is not None]
    if len(numbers) < len(distinct) or not numbers:
        return _one_by_one(distinct, start, end, upright)
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= 10:
        return _logarithmic(numbers, start, end, upright)
    margin = 0.06 * (numbers[-1] - numbers[0]) or 0.5 * abs(numbers[0]) or 0.5
    return linear(numbers[0] - margin, numbers[-1] + margin, start, end, upright, numbers)


def of_losses(values: Iterable[float], start: float, end: float) -> Scale:
    """For losses, on a vertical axis: what is far above the others lies beyond its end."""
    known = sorted(values)
    if not known:
        return linear(0.0, 1.0, start, end, upright=True)
    low, high = known[0], known[-1]
    if len(known) >= 4:
        first, _, third = statistics.quantiles(known, n=4, method="inclusive")
        fence = third + 3 * (third - first)
        high = max(value for value in known if value <= max(fence, third))
    margin = 0.06 * (high - low) or 0.05 * abs(low) or 0.5
    return linear(low - margin, high + margin, start, end, upright=True)


def linear(
    low: float, high: float, start: float, end: float, upright: bool = False, marks: list[float] | None = None
) -> Scale:
    """
    Args:
        marks: values to write at the axis where they are few; else round ones are chosen.
    """

    def place(value: Value) -> float:
        return start + (end - start) * (float(value or 0) - low) / (high - low)

    if marks is not None and len(marks) <= 7:
        ticks = [Tick(place(mark), brief(mark)) for mark in marks]
    else:
        ticks = _round_ticks(low, high, place, most=max(2, round(abs(end - start) / (38 if upright else 70))))
    return Scale(place, _legible(ticks, upright), start, end)


def _logarithmic(numbers: list[float], start: float, end: float, upright: bool) -> Scale:
    low, high = math.log10(numbers[0]), math.log10(numbers[-1])
    margin = 0.06 * (high - low)
    low, high = low - margin, high + margin

    def place(value: Value) -> float:
        exponent = math.log10(float(value)) if is_number(value) and value and float(value) > 0 else low
        return start + (end - start) * (exponent - low) / (high - low)

    marks = numbers
    if len(numbers) > 7:
        digits = (1, 2, 5) if high - low < 2.5 else (1,)
        every = max(1, round((high - low) / 8))
        decades = range(math.floor(low), math.ceil(high) + 1, every)
        marks = [digit * 10.0**decade for decade in decades for digit in digits]
        marks = [mark for mark in marks if low <= math.log10(mark) <= high]
    written = brief if marks[0] >= 1e-3 else scientific
    return Scale(place, _legible([Tick(place(mark), written(mark)) for mark in marks], upright), start, end)


def _one_by_one(distinct: list[Value], start: float, end: float, upright: bool) -> Scale:
    order_of = {identity(value): number for number, value in enumerate(distinct)}

    def place(value: Value) -> float:
        return start + (end - start) * (order_of.get(identity(value), 0) + 0.5) / max(1, len(distinct))

    room = LONGEST_LABEL if upright else abs(end - start) / max(1, len(distinct)) / CHARACTER - 1
    ticks = [Tick(place(value), cut_inside(shown(value), max(5, min(LONGEST_LABEL, int(room))))) for value in distinct]
    return Scale(place, _legible(ticks, upright), start, end)


def _round_ticks(low: float, high: float, place: Callable[[Value], float], most: int) -> list[Tick]:
    """At most about `most` multiples of 1, 2 or 5 times a power of ten, with equally many digits."""
    rough = (high - low) / most
    power = math.floor(math.log10(rough))
    step = next(digit * 10.0**power for digit in (1, 2, 5, 10) if digit * 10.0**power >= rough * 0.999)
    marks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    plain = digits <= 6 and max(abs(low), abs(high)) < 1e6
    return [Tick(place(mark), f"{mark:.{digits}f}" if plain else brief(mark)) for mark in marks]


def _legible(ticks: list[Tick], upright: bool) -> list[Tick]:
    """Without those whose labels would run into the one before."""
    kept: list[Tick] = []
    for tick in sorted(ticks, key=lambda tick: tick.at):
        needed = LINE if upright else CHARACTER * (len(tick.label) + len(kept[-1].label if kept else "")) / 2 + 8
        if not kept or tick.at - kept[-1].at >= needed:
            kept.append(tick)
    return kept
