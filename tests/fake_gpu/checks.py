"""Compare what a case did with what it may do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fake_gpu.cases import Case
from fake_gpu.expected import STEPS, Collectives, collectives_of, waits_of
from fake_gpu.process import job


def job_of(case: Case) -> dict[str, Any]:
    return job("run_case", overrides=case.overrides(), world_size=case.ranks, rank=case.rank)


def collectives_per_step(result: dict[str, Any]) -> Collectives:
    found = {}
    for kind, (count, size) in result["collectives"].get("steps", {}).items():
        assert count % STEPS == size % STEPS == 0, f"the steps differ in {kind}"
        found[kind] = [count // STEPS, size // STEPS]
    return found


def differences(case: Case, result: dict[str, Any]) -> list[str]:
    """Return a line for each wait and collective that is not expected, or is missing.

    Of the phases that the case went through.
    """
    found: Counter[tuple[str, str]] = Counter()
    for phase, waits in result["waits"].items():
        for what, count in waits.items():
            found[phase, what] += count
    allowed = [w for w in waits_of(case, result["shapes"]) if w.phase in result["waits"]]
    expected = Counter({(wait.phase, wait.what): wait.count for wait in allowed})
    lines = []
    for phase, what in sorted(found.keys() | expected.keys()):
        have, want = found[phase, what], expected[phase, what]
        if have != want:
            lines.append(f"{phase}: {have} times, not {want}: {what}")
    sent = collectives_per_step(result)
    wanted = collectives_of(case, result["shapes"]) if "steps" in result["waits"] else {}
    for kind in sorted(sent.keys() | wanted.keys()):
        if sent.get(kind) != wanted.get(kind):
            lines.append(f"steps: {kind}: {sent.get(kind)}, not {wanted.get(kind)}")
    return lines
