"""Part 7 of gpu.py: compare what the package and torch do with other ways, to find faster ones."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_ways as ways_of
from common import cell, in_fresh_process, spread
from gpu_first import finished
from gpu_runs import Part, Table, ratios, shown
from gpu_training import CHAR, GPT2, TINY, our_command, our_speed
from gpu_ways import Seconds
from trainers import PLAIN, Setting

HEADER = ["what", "way", "figure", "unit", "over the first way"]

# Each comparison has a name, a function to call in a new process, a unit, and the factor that turns
# seconds or bytes into this unit.
IN_PROCESS: list[tuple[str, Callable[[str, bool], Seconds], str, float]] = [
    ("staging buffer, 1.5 GB, allocation", ways_of.allocation, "ms", 1e3),
    ("staging buffer, 1.5 GB, memory", ways_of.host_memory, "GB", 1e-9),
    ("staging buffer, 1.5 GB, copy", ways_of.staging_copy, "ms", 1e3),
    ("flags of a step, two ranks", ways_of.flags, "ms", 1e3),
    ("broadcast of 1.5 GB, one rank", ways_of.broadcast_state, "ms", 1e3),
    ("a step with DDP's timer, one rank", ways_of.ddp_timer, "ms", 1e3),
    ("all_reduce of gradients, one rank", ways_of.all_reduces, "ms", 1e3),
    ("all_gather of updates, one rank", ways_of.all_gathers, "ms", 1e3),
    ("passes of GPT-2's shape, eager", ways_of.vocabulary, "ms", 1e3),
]


def attention(part: Part) -> dict[str, dict[str, Callable[[], float]]]:
    """Make functions that measure tokens/s with and without cuDNN's attention.

    torch prefers this attention on Hopper.
    """
    settings = {"tiny": TINY} if part.dry else {"10.7M": CHAR, "GPT-2's shape": GPT2}
    found = {}
    for name, setting in settings.items():
        ways = {"cuDNN attention": "0", "TORCH_CUDNN_SDPA_DEPRIORITIZED=1": "1"}
        found[f"{name}, tokens/s"] = {
            way: our_speed(
                part, setting, PLAIN, variables={"TORCH_CUDNN_SDPA_DEPRIORITIZED": value}
            )
            for way, value in ways.items()
        }
    return found


def short_runs(part: Part) -> dict[str, Callable[[], float]]:
    """Make functions that time a whole short run with trainer.compile=auto and with false.

    Nothing has been compiled before, as in a user's first run.
    """
    setting, steps = (TINY, 6) if part.dry else (CHAR, 300)
    return {
        f"trainer.compile={mode}": partial(seconds_of_run, part, setting, steps, mode)
        for mode in ("auto", "false")
    }


def seconds_of_run(part: Part, setting: Setting, steps: int, mode: str) -> float:
    words = [f"trainer.compile={mode}", f"trainer.max_steps={steps}"]
    command = our_command(part, setting, PLAIN, *words)
    with tempfile.TemporaryDirectory(dir=part.scratch) as empty:  # a cache without compiled code
        begin = time.perf_counter()
        finished(["env", f"TORCHINDUCTOR_CACHE_DIR={empty}", *command], part)
        return time.perf_counter() - begin


def comparisons(part: Part) -> Table:
    """Measure every way. If one fails, the others are still measured."""
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []

    def add(what: str, values: Seconds, unit: str) -> None:
        first = next(iter(values.values()), None)
        figures[what] = {"unit": unit, **{way: spread(found) for way, found in values.items()}}
        for way, found in values.items():
            is_other = found is not first and all(value > 0 for value in first or [])
            ratio = shown(ratios(found, first)) if is_other else "-"
            form = ",.0f" if unit == "tokens/s" else ",.4g"
            rows.append([what, way, cell(spread(found), form), unit, ratio])

    for what, function, unit, factor in IN_PROCESS:
        work = partial(in_fresh_process, function, part.device, part.dry)
        if (found := part.measure(what, partial(work, limit_s=part.left_s()))) is not None:
            scaled = {way: [factor * value for value in values] for way, values in found.items()}
            add(what, scaled, unit)
    with part.within(0.5):
        add("a short run", part.alternate("a short run", short_runs(part)), "s")
    for what, ways in attention(part).items():
        with part.within(0.6):
            add(what, part.alternate(what, ways), "tokens/s")
    return figures, HEADER, rows
