"""Keep the record of a comparison that ends as soon as it is decided (`until=decided`).

A setting is a configuration without its seed, or a version of the code. Each of its jobs trains
with one seed.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mingpt_ddp.config.validation import check
from mingpt_ddp.storage.sweep_file import SweepFile, recorded_until_decided
from mingpt_ddp.study.results.runs import number
from mingpt_ddp.study.results.stats.sequential import Decision, Pair, SequentialTest

log = logging.getLogger(__name__)


@dataclass
class SequentialRecord:
    """The rule of a comparison, the runs that count, and the decisions so far.

    The first setting is the reference. Each other setting is compared with it.
    """

    settings: list[str]  # label of each setting
    seeds: list[str]  # each seed as text, in the order in which the pairs are tested
    metric: str | None  # sweep.metric
    # Smallest difference that matters: sweep.care, or care of the command `versions`. None if every
    # difference matters. Recorded under this name.
    care: float | None
    # Name of the run directory for each label and seed.
    runs: dict[str, dict[str, str]] = field(default_factory=dict)
    # The pairs on which each decision rests, by label of the decided setting.
    decided: dict[str, list[Pair]] = field(default_factory=dict)
    # Keys that change the results and have the same value in all settings, with their JSON values.
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        return self.settings[0]

    @property
    def test(self) -> SequentialTest:
        return SequentialTest(len(self.settings) - 1, self.care)

    def setting_of(self, directory: Path) -> str | None:
        """Return the label of the setting that a run directory belongs to, or None."""
        for label, names in self.runs.items():
            if directory.name in names.values():
                return label
        return None

    def pairs(
        self, reference: Mapping[str, float], other: Mapping[str, float]
    ) -> tuple[list[Pair], str | None]:
        """Pair the costs of two settings by seed, up to the first seed without both costs.

        Args:
            reference, other: The cost of each seed. The seeds are text, as in `seeds`.

        Returns:
            The pairs, and the first seed without a pair, or None if all seeds have a pair.
        """
        pairs = list[Pair]()
        for seed in self.seeds:
            pair = Pair(reference.get(seed, math.inf), other.get(seed, math.inf))
            if not math.isfinite(pair.difference):
                return pairs, seed
            pairs.append(pair)
        return pairs, None


def read_sequential(directory: Path) -> SequentialRecord | None:
    """Read the record in the directory of a comparison. Its file is untrusted.

    Returns:
        None if the directory has no record of until=decided, or if the record cannot be read.
    """
    values = recorded_until_decided(directory)
    try:
        settings = [*map(str, values["settings"])]
        if len(settings) < 2:
            return None
        decided = {
            str(label): [Pair(_number(a), _number(b)) for a, b in pairs]
            for label, pairs in values["decided"].items()
        }
        return SequentialRecord(
            settings,
            [*map(str, values["seeds"])],
            None if values["metric"] is None else str(values["metric"]),
            None if values["care"] is None else _number(values["care"]),
            {
                str(label): {str(seed): str(name) for seed, name in names.items()}
                for label, names in values["runs"].items()
                if label in settings
            },
            {label: pairs for label, pairs in decided.items() if label in settings[1:]},
            dict(values.get("fixed", {})),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _number(value: Any) -> float:
    """Convert a recorded number to a float.

    Raises:
        ValueError: The value is not a finite number.
    """
    found = number(value)
    if found is None:
        raise ValueError
    return found


class SequentialComparison:
    """Decide which settings of a comparison need more seeds.

    Each decision is written to sweep.json before the next job starts.
    """

    def __init__(self, directory: Path, file: SweepFile, rule: SequentialRecord) -> None:
        """Begin a comparison, or continue the recorded one.

        Args:
            directory: Directory that holds the runs.
            file: The sweep file of this directory.
            rule: A record without runs and decisions. It has enough seeds for `check_seeds`.

        Raises:
            ConfigError: The directory has a record with a different rule.
        """
        before = read_sequential(directory)
        if before is not None:
            _check_rule(directory, before, rule)
            rule.seeds = max(before.seeds, rule.seeds, key=len)  # the first seeds are the same
            rule.runs = before.runs
            rule.decided = before.decided
        self.record = rule
        self._file = file
        self._costs: dict[str, dict[str, float]] = {label: {} for label in rule.settings}
        self._write()

    def needs_more_seeds(self, label: str, failed: Collection[str] = ()) -> bool:
        """Return True if a setting needs more seeds.

        The reference needs more seeds as long as another setting does. If a job of the reference
        has failed, no setting needs more.

        Args:
            label: Label of the setting.
            failed: Labels of the settings that have a failed job. They need no more seeds.
        """
        # A result without the metric has infinite cost. Like a failed job, it decides nothing.
        costs = self._costs.items()
        failed = {*failed, *(each for each, c in costs if math.inf in map(abs, c.values()))}
        undecided = [
            each
            for each in self.record.settings[1:]
            if each not in self.record.decided and each not in failed
        ]
        if self.record.reference in failed:
            return False
        return bool(undecided) if label == self.record.reference else label in undecided

    def add(self, label: str, seed: str, directory: Path, cost: float) -> None:
        """Add the result of a job, test the settings that are not decided, and write the record.

        Args:
            label: Label of the job's setting.
            seed: Seed of the job as text.
            directory: Run directory of the job.
            cost: The objective of the job as a cost: lower is better.
        """
        self.record.runs.setdefault(label, {})[seed] = directory.name
        self._costs[label][seed] = cost
        for other in self.record.settings[1:]:
            if other not in self.record.decided:
                self._decide(other)
        self._write()

    def _decide(self, other: str) -> None:
        """Record and log the decision on a setting, if its pairs are enough to decide."""
        record = self.record
        pairs, _ = record.pairs(self._costs[record.reference], self._costs[other])
        n = record.test.decided_after(pairs)
        if n is None:
            return
        record.decided[other] = pairs[:n]
        evidence = record.test.evidence(pairs[:n])
        assert evidence is not None
        verdict = f"differs from {record.reference} by less than {record.care}"
        if evidence.decision is Decision.DIFFERENT:
            better = "worse" if evidence.difference > 0 else "better"
            verdict = f"is {better} than {record.reference}"
        log.info("decided after %d pairs of seeds: %s %s", n, other, verdict)

    def _write(self) -> None:
        decided = {
            label: [[pair.reference, pair.other] for pair in pairs]
            for label, pairs in self.record.decided.items()
        }
        self._file.keep_until_decided({**asdict(self.record), "decided": decided})


def check_seeds(n_settings: int, n_seeds: int) -> None:
    """Check that there are enough seeds to decide anything.

    Raises:
        ConfigError: There are too few seeds. The message says how many are needed.
    """
    comparisons = n_settings - 1
    needed = SequentialTest(comparisons).min_pairs
    check(
        n_seeds >= needed,
        f"until=decided cannot decide {comparisons} comparison{'s' * (comparisons > 1)} with "
        f"{n_seeds} seeds; give at least {needed} seeds, and better 12",
    )


def _check_rule(directory: Path, before: SequentialRecord, now: SequentialRecord) -> None:
    """Check that a rule is the recorded one. Only seeds may be added at the end.

    Raises:
        ConfigError: The rules differ. The message names the difference.
    """
    shorter = min(len(before.seeds), len(now.seeds))
    check(
        before.seeds[:shorter] == now.seeds[:shorter],
        f"{directory} was begun with until=decided and seeds {', '.join(before.seeds)} in this "
        "order; add seeds at the end only",
    )
    advice = "restore the first value, or begin in another directory"
    rules = [
        {"settings": each.settings, "metric": each.metric, "care": each.care, **each.fixed}
        for each in (before, now)
    ]
    for name in rules[0] | rules[1]:
        then, new = (rule.get(name) for rule in rules)
        check(
            then == new,
            f"{directory} was begun with until=decided and {name}={then}, but now {name} is {new}; "
            f"{advice}",
        )
