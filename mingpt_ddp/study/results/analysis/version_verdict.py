"""Compare versions of the code with the first version: loss, speed, and the bits of weights."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.study.results.analysis.compare import Comparison, Setting, compare_with_first
from mingpt_ddp.study.results.analysis.verdict import notes_on, sentence, to_numbers, to_text
from mingpt_ddp.study.results.groups import means_by_seed, seed_of
from mingpt_ddp.study.results.notes import comparison_notes
from mingpt_ddp.study.results.runs import RunRecord, grouped, number
from mingpt_ddp.study.results.stats.intervals import estimate

SAME = "the same bits"


@dataclass(frozen=True)
class VersionVerdict:
    """The verdict on a version of the code, which is compared with the first version."""

    first: Setting
    other: Setting
    comparison: Comparison
    bits: dict[str, str]  # for each seed, SAME or a description of the difference

    @property
    def is_equal(self) -> bool:
        """True if each seed has the same loss in both versions, to the last bit."""
        losses = self.other.by_seed
        return bool(losses) and losses.items() <= self.first.by_seed.items()

    @property
    def has_same_bits(self) -> bool:
        """True if each seed has ended with the same bits in both versions."""
        return {*self.bits.values()} == {SAME}

    @property
    def is_worse(self) -> bool:
        """True if the other version is worse by more than chance, or if nothing can be said."""
        if self.is_equal:
            return False
        comparison = self.comparison
        is_unknown = comparison.difference is None or comparison.why is not None
        return is_unknown or comparison.better is self.first

    @property
    def sentences(self) -> list[str]:
        """Verdicts on the loss, the speed and the bits of the other version."""
        names = f"{self.other.label} against {self.first.label}"
        quality = sentence(self.comparison)
        if self.is_equal:
            quality = f"{names}: the same {self.first.ranked_by.title} at each seed"
        seeds = grouped(self.bits, self.bits.__getitem__)
        bits = "; ".join(f"{verdict} with seed {', '.join(seeds[verdict])}" for verdict in seeds)
        speeds = (
            f"a step is {_format_speed(self.speed(_step_ms))}, "
            f"the whole run is {_format_speed(self.speed(_seconds))}"
        )
        said = [quality, f"{names}, speed: {speeds}"]
        return [*said, f"{names}: {bits}"] if bits else said

    def numbers(self) -> dict[str, Any]:
        """Convert the verdict to JSON values."""
        speeds = {"step": self.speed(_step_ms), "whole": self.speed(_seconds)}
        said = "; ".join(self.sentences)
        return {"version": self.other.label, "speed": speeds, "bits": self.bits, "sentence": said}

    def speed(self, time: Callable[[RunRecord], float | None]) -> list[float] | None:
        """Divide the speed of the other version by the speed of the first version.

        The mean over seeds is geometric, because ratios of 2 and 1/2 are equally far from 1.

        Args:
            time: Measures the time of a job. Returns None if the job has no such measurement.

        Returns:
            The mean ratio, and the lower and upper end of its 95% interval. None if fewer than two
            seeds have times in both versions.
        """
        first = means_by_seed(self.first.jobs, time)
        other = means_by_seed(self.other.jobs, time)
        pairs = [(first[seed], other[seed]) for seed in first if seed in other]
        ratios = [before / after for before, after in pairs if min(before, after) > 0]
        log_ratio = estimate([*map(math.log, ratios)])
        if log_ratio.mean is None or log_ratio.low is None or log_ratio.high is None:
            return None
        return [*map(math.exp, (log_ratio.mean, log_ratio.low, log_ratio.high))]


def version_verdict(
    settings: list[Setting], digests: Mapping[Path, str]
) -> tuple[list[VersionVerdict], dict[str, Any], str]:
    """Compare versions of the code with the first version.

    Args:
        settings: The versions. Each has the jobs of all its seeds.
        digests: Digests of the final weights and optimizer state, by run directory.

    Returns:
        The verdict on each version but the first, the comparison as JSON values, and as text.
    """
    first, *others = settings
    jobs = [job for setting in settings for job in setting.jobs]
    first_jobs = {seed_of(job): job for job in first.jobs}
    comparisons = compare_with_first(settings)
    verdicts = []
    for other, comparison in zip(others, comparisons, strict=True):
        bits = {
            seed: _bits(first_jobs[seed], job, digests)
            for job in other.jobs
            if (seed := seed_of(job)) in first_jobs
            and job.directory in digests
            and first_jobs[seed].directory in digests
        }
        verdicts.append(VersionVerdict(first, other, comparison, bits))
    notes = comparison_notes(jobs, are_versions=True)
    notes += notes_on(settings, comparisons, len(others))
    document = to_numbers(jobs, settings, comparisons, notes, len(others))
    for record, each in zip(document["comparisons"], verdicts, strict=True):
        record.update(each.numbers())
    sentences = [line for each in verdicts for line in each.sentences]
    return verdicts, document, to_text(jobs, settings, notes, sentences)


def _step_ms(job: RunRecord) -> float | None:
    """Return the median time of a step over the log steps, in milliseconds."""
    values = job.history.values("step_ms")
    return statistics.median(values) if values else None


def _seconds(job: RunRecord) -> float | None:
    """Return the time of the whole run in seconds."""
    return number(job.result.get("wall_seconds"))


def _format_speed(speed: list[float] | None) -> str:
    """Format a ratio of speeds: `0.970 times as fast (95% interval 0.963 to 0.977: slower)`."""
    if speed is None:
        return "of unknown speed"
    mean, low, high = speed
    what = "no difference shown" if low <= 1 <= high else "faster" if low > 1 else "slower"
    return f"{mean:.3f} times as fast (95% interval {low:.3f} to {high:.3f}: {what})"


def _bits(one: RunRecord, other: RunRecord, digests: Mapping[Path, str]) -> str:
    """Describe whether two jobs end with the same bits.

    If the bits differ, name the first step with a different training loss. If the lengths of the
    runs differ, name both.
    """
    if digests[one.directory] == digests[other.directory]:
        return SAME
    other_losses = dict(other.history.series("train_loss"))
    lengths = ""
    if other.step != one.step:
        lengths = f", different lengths ({other.step} steps against {one.step})"
    for step, loss in one.history.series("train_loss"):
        if other_losses.get(step, loss) != loss:
            return f"different bits, first seen at step {step}{lengths}"
    return f"different bits{lengths}"
